"""What dockerTools.buildLayeredImage gives, near enough: a gzipped docker archive of one layer, with the closure of the contents.

The stub's Python is Debian's, so that and the libraries it needs go along.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

out, graph, *contents = sys.argv[1:]
content = json.loads(os.environ["CONTENT"])


def plain(info: tarfile.TarInfo) -> "tarfile.TarInfo | None":
    if info.name.endswith((".pyc", "__pycache__")):
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 1
    info.mode |= 0o444
    return info


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 1, 0o644
    archive.addfile(info, io.BytesIO(data))


def link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mtime = tarfile.SYMTYPE, target, 1
    archive.addfile(info)


python = os.path.realpath("/usr/bin/python3")
paths = {line for line in Path(graph).read_text().splitlines() if line.startswith("/nix/store/")}
modules = [
    *Path("/usr/lib/python3.11/lib-dynload").glob("*.so"),
    *(file for path in paths for file in Path(path).rglob("*.so")),
]
libraries = set()
for program in (python, "/bin/sh", *map(str, modules)):
    libraries |= set(
        re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout)
    )

layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as archive:
    for name in ("lib", "lib64"):
        link(archive, name, f"usr/{name}")
    for path in sorted(
        {python, "/usr/bin/env", "/usr/bin/sh", "/usr/lib/python3.11"}
        | {os.path.join("/usr", p.lstrip("/")) if not p.startswith("/usr") else p for p in libraries}
    ):
        source = os.path.realpath(path)
        archive.add(source, path.lstrip("/"), filter=plain)
    link(archive, "usr/bin/python3", os.path.basename(python))
    link(archive, "bin/sh", "/usr/bin/sh")
    link(archive, "bin/python3", f"{contents[0]}/bin/python3")
    for path in sorted(paths):
        archive.add(path, path.lstrip("/"), filter=plain)

digest = hashlib.sha256(layer.getvalue()).hexdigest()
config = json.dumps(
    {
        "architecture": "amd64", "os": "linux", "created": "1970-01-01T00:00:01Z", "config": content["config"],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}, "history": [{"created": "1970-01-01T00:00:01Z"}],
    },
    sort_keys=True,
).encode()  # fmt: skip
identity = hashlib.sha256(config).hexdigest()
manifest = [
    {
        "Config": f"{identity}.json",
        "RepoTags": [f"{content['name']}:{content['tag']}"],
        "Layers": [f"{digest}/layer.tar"],
    }
]
with (
    open(out, "wb") as file,
    gzip.GzipFile("", "wb", 6, file, 0) as packed,
    tarfile.open(fileobj=packed, mode="w") as archive,
):
    add(archive, f"{identity}.json", config)
    add(archive, f"{digest}/layer.tar", layer.getvalue())
    add(archive, "manifest.json", json.dumps(manifest).encode())
