"""Keeps what is written twice the same, and renews pins: `python3 -m tools pins [--check | --images | --torch]`.

matrix.json and toolchain.lock are the sources. From them are written: docker/docker-bake.json, nix/wheels.json, and the lines of other files
in which an image or a revision must be spelled out. Renewing asks registries of images, and pip for torch, with the user's own configuration.
"""

import json
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tools import ROOT, matrix
from tools.errors import BuildError, explain
from tools.locks import read_toolchain_lock
from tools.process import capture, last_error
from tools.toolchain import Log, pip_command

NIX_WHEELS = ROOT / "nix" / "wheels.json"
TORCH = ROOT / "docker" / "torch.txt"


def rendered() -> "dict[str, str]":
    """Path and text of every file that is written, wholly or in places, from matrix.json and toolchain.lock."""
    files = {"docker/docker-bake.json": bake(), "nix/wheels.json": nix_wheels()}
    for name, places in PLACES.items():
        with explain(f"cannot read {name}"):
            text = (ROOT / name).read_text(encoding="utf-8")
        for pattern, value in places:
            text, count = re.subn(pattern, lambda match, value=value: match[1] + value() + match[2], text)  # type: ignore[misc]
            if count == 0:
                raise BuildError(f"{name} has no line {pattern}, which matrix.json would fill")
        files[name] = text
    return files


def _image(name: str) -> Any:
    return lambda: matrix.read().images[name]


def _revision() -> str:
    return matrix.read().nixpkgs["rev"]


def _hash() -> str:
    return matrix.read().nixpkgs["narHash"]


def _cibuildwheel() -> str:
    return ", ".join(f'"{tag}-manylinux_*"' for tag in python_tags())


PLACES = {
    "docker/Dockerfile": [
        (r"(ARG BUILDER_BASE=)\S+()", _image("manylinux_x86_64")),
        (r"(ARG RUNTIME_BASE=)\S+()", _image("cuda_base")),
        (r"(ARG DEV_BASE=)\S+()", _image("cuda_devel")),
    ],
    "pyproject.toml": [
        (r'(\nbuild = \[)[^\]]*(\]\n)', _cibuildwheel),
        (r'(manylinux-x86_64-image = ")[^"]+(")', _image("manylinux_x86_64")),
        (r'(manylinux-aarch64-image = ")[^"]+(")', _image("manylinux_aarch64")),
    ],
    "flake.nix": [(r'(github:NixOS/nixpkgs/)[0-9a-f]+(")', _revision)],
    "flake.lock": [(r'("rev": ")[0-9a-f]+(")', _revision), (r'("narHash": ")[^"]+(")', _hash)],
}  # fmt: skip


def python_tags() -> "list[str]":
    """cp39, ..., cp314t."""
    return ["cp" + version.replace(".", "") for version in matrix.read().pythons]


def bake() -> str:
    """The file for `docker buildx bake`: a target for each image and setting."""
    content = matrix.read()
    interpreters = " ".join(f"/opt/python/{tag.rstrip('t')}-{tag}/bin/python" for tag in python_tags())
    targets: dict[str, Any] = {
        "common": {"context": ".", "dockerfile": "docker/Dockerfile", "args": {"SOURCE_DATE_EPOCH": "315532800"}},
        "dev": {"inherits": ["common"], "target": "dev", "tags": ["flash_kda:dev"]},
    }
    groups: dict[str, Any] = {"default": {"targets": [f"runtime-{content.settings[0]}"]}}
    for setting in content.settings:
        archs = {"FLASH_KDA_CUDA_ARCHS": setting}
        name = setting.replace(",", "-")
        targets[f"runtime-{name}"] = {
            "inherits": ["common"],
            "target": "runtime",
            "args": archs,
            "tags": [f"flash_kda:{name}"],
        }
        targets[f"wheels-{name}"] = {
            "inherits": ["common"],
            "target": "wheels",
            "args": {**archs, "PYTHONS": interpreters, "TORCH_REQUIREMENTS": "/dev/null"},
            "output": [f"type=local,dest=dist/{name}"],
        }
    groups["runtime"] = {"targets": [name for name in targets if name.startswith("runtime-")]}
    groups["wheels"] = {"targets": [name for name in targets if name.startswith("wheels-")]}
    return json.dumps({"group": groups, "target": targets}, indent=2) + "\n"


def nix_wheels() -> str:
    """nix/wheels.json with the hashes of toolchain.lock; the names of the files are kept, or asked of pip where the version changed."""
    with explain("cannot read nix/wheels.json"):
        old = json.loads(NIX_WHEELS.read_text(encoding="utf-8")) if NIX_WHEELS.exists() else []
    rows = []
    for pin in read_toolchain_lock().values():
        prefix = f"{re.sub('[-.]+', '_', pin.name)}-{pin.version}-"
        for row in old:
            if row["file"].startswith(prefix) and row["sha256"] in pin.hashes:
                rows.append(row)
        known = {row["sha256"] for row in rows}
        if not set(pin.hashes) <= known:
            rows = [row for row in rows if row["sha256"] not in pin.hashes]
            for machine in matrix.read().machines:
                for file, digest in resolve(f"{pin.name}=={pin.version}", machine, dependencies=False).items():
                    if digest not in pin.hashes:
                        raise BuildError(f"{file} has sha256 {digest}, which toolchain.lock does not list")
                    same = next((row for row in rows if row["file"] == file), None)
                    if same:
                        same["machines"].append(machine)
                    else:
                        rows.append({"file": file, "sha256": digest, "machines": [machine]})
    return json.dumps(rows, indent=1) + "\n"


def resolve(requirement: str, machine: str, dependencies: bool) -> "dict[str, str]":
    """File name and sha256 of each wheel that pip would install for Python 3.10 on Linux; nothing is installed."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 36)] + [
        f"manylinux{old}_{machine}" for old in (1, 2010, 2014)
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *pip_command(),
            "install",
            "--dry-run",
            "--quiet",
            "--ignore-installed",
            "--only-binary=:all:",
            "--target",
            folder,
        ]
        command += ["--python-version", "3.10", "--implementation", "cp", "--report", str(report), requirement]
        command += [] if dependencies else ["--no-deps"]
        for tag in tags:
            command += ["--platform", tag]
        result = capture(command)
        if result.returncode != 0:
            raise BuildError(f"pip does not find {requirement} for {machine}: {last_error(result.stderr)}")
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {}
    for item in installed:
        name = urllib.parse.unquote(item["download_info"]["url"].rsplit("/", 1)[-1])
        found[name] = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return found


def torch_requirements(version: str) -> str:
    """docker/torch.txt: torch and all that it needs, with hashes for every machine."""
    hashes: dict[str, list[str]] = {}
    for machine in matrix.read().machines:
        for file, digest in resolve(f"torch=={version}", machine, dependencies=True).items():
            name, number = file.split("-")[:2]
            known = hashes.setdefault(f"{name.replace('_', '-').lower()}=={number}", [])
            if digest not in known:
                known.append(digest)
    head = "# torch and all that it needs, for Python 3.10 as in the runtime image; x86_64 and aarch64. Written by `python3 -m tools pins`.\n"
    lines = [
        name + "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes[name]) + "\n" for name in sorted(hashes)
    ]
    return head + "".join(lines)


def image_digest(reference: str, scheme: str = "https") -> str:
    """The digest that a registry gives for REGISTRY/NAME:TAG now, by the distribution protocol, anonymously."""
    match = re.fullmatch(r"([^/]+)/([^:@]+):([^@]+)(@sha256:[0-9a-f]{64})?", reference)
    if not match:
        raise BuildError(f"{reference} is not REGISTRY/NAME:TAG")
    registry, name, tag = match[1].replace("docker.io", "registry-1.docker.io"), match[2], match[3]
    url = f"{scheme}://{registry}/v2/{name}/manifests/{tag}"
    kinds = (
        "vnd.oci.image.index.v1",
        "vnd.docker.distribution.manifest.list.v2",
        "vnd.oci.image.manifest.v1",
        "vnd.docker.distribution.manifest.v2",
    )
    headers = {"Accept": ", ".join(f"application/{kind}+json" for kind in kinds)}
    try:
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, method="HEAD", headers=headers), timeout=60)
        except urllib.error.HTTPError as error:
            challenge = dict(re.findall(r'(\w+)="([^"]*)"', error.headers.get("WWW-Authenticate", "")))
            if error.code != 401 or "realm" not in challenge:
                raise
            query = urllib.parse.urlencode(
                {key: value for key, value in challenge.items() if key in ("service", "scope")}
            )
            with urllib.request.urlopen(f"{challenge['realm']}?{query}", timeout=60) as token:
                headers["Authorization"] = f"Bearer {json.load(token)['token']}"
            answer = urllib.request.urlopen(urllib.request.Request(url, method="HEAD", headers=headers), timeout=60)
        with answer:
            return str(answer.headers["Docker-Content-Digest"])
    except (OSError, ValueError, KeyError) as error:
        raise BuildError(f"{registry} does not tell the digest of {name}:{tag}: {error}") from error


def renew_images(log: Log = print) -> None:
    """Ask for the digest of every image in matrix.json, by its tag, and write what changed."""
    text = matrix.FILE.read_text(encoding="utf-8")
    for name, reference in matrix.read().images.items():
        tagged = reference.split("@")[0]
        digest = image_digest(tagged)
        log(f"{name}: {tagged} {'as before' if reference.endswith(digest) else 'is now ' + digest}")
        text = text.replace(reference, f"{tagged}@{digest}")
    matrix.FILE.write_text(text, encoding="utf-8")


def write(log: Log = print) -> None:
    """Bring every file of rendered() up to date."""
    for name, text in rendered().items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            log(f"written: {name}")


def stale() -> "list[str]":
    """Files that are not as rendered() has them."""
    return [
        name
        for name, text in rendered().items()
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
