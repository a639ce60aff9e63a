"""Wheels: the same bytes for the same inputs, the manylinux tag, and what must be true of one that is released."""

import hashlib
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from urllib.parse import quote

from flash_kda import elf
from flash_kda.verify import Wheel, examine, read_wheel
from tools import ROOT, settings
from tools.archs import plan
from tools.errors import BuildError, explain
from tools.host import describe_python
from tools.locks import DEVICE_CODE_LOCK, toolchain_digest
from tools.process import capture, last_error
from tools.toolchain import DEVICE, HOST, WHEEL, Log, Toolchain, obtain

SIZE_LIMIT = 5 * 1000 * 1000
# 1980-01-01, the oldest time that a zip archive can say.
OLDEST_ZIP_TIME = 315532800
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d")
LICENSES = {
    "LICENSE": b"MIT License",
    "licenses/CUTLASS.txt": b"NVIDIA CORPORATION",
    "licenses/pybind11.txt": b"Wenzel Jakob",
    "licenses/zig.txt": b"Zig contributors",
}
# Places that a build happens in; none of them belongs into a wheel.
LOCAL_PATH = re.compile(rb"/(home|root|tmp|work|build|github|Users)/[\w./-]+|/\.cache/")


def source_date_epoch() -> int:
    """SOURCE_DATE_EPOCH if it is set, else a constant: the time of the build must not show."""
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    return max(int(value), OLDEST_ZIP_TIME) if value.isdigit() else OLDEST_ZIP_TIME


def normalise(wheel: Path) -> None:
    """Rewrite a wheel with sorted members, one time stamp and plain modes, so that neither clock, umask nor directory order shows."""
    stamp = time.gmtime(source_date_epoch())[:6]
    part = wheel.with_name(f".part-{wheel.name}")
    with explain(f"cannot write {wheel}"):
        try:
            with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
                names = [info.filename for info in old.infolist() if not info.is_dir()]
                for name in sorted(names, key=lambda name: (".dist-info/" in name, name.endswith("/RECORD"), name)):
                    info = zipfile.ZipInfo(name, stamp)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.create_system = 3  # Unix, so that the mode below is read
                    info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
                    new.writestr(info, old.read(name), compresslevel=9)
            part.replace(wheel)
        finally:
            part.unlink(missing_ok=True)


def release(arch_setting: str, output: Path, log: Log = print) -> Path:
    """Build, repair and check a wheel for this Python; returns its path in `output`. The wheel before repair stays in build/wheel."""
    if settings.text(settings.CXX):
        raise BuildError(f"{settings.CXX} is set, but a wheel for others is made with the pinned compiler; unset it")
    plan(arch_setting)  # what these two object to is known before 250 MB are downloaded
    describe_python()
    toolchain = obtain((DEVICE, HOST, WHEEL), log)
    raw = build_raw(toolchain, ROOT / "build" / "wheel", arch_setting, log)
    wheel = repair(raw, toolchain, output)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    log(f"wheel: {wheel} ({wheel.stat().st_size / 1e6:.2f} MB, sha256 {digest})")
    return wheel


# Lines of the build that a person wants to see; the rest is setuptools talking.
_PROGRESS = ("toolchain", "architectures", "device", "host module", "waiting", "registers", "  ptxas", "  kernels/")


def build_raw(toolchain: Toolchain, output: Path, arch_setting: str, log: Log = print) -> Path:
    """Build the wheel with the pinned setuptools, out of reach of whatever is installed; returns its path."""
    script = "import sys; from setuptools import build_meta; print('wheel: ' + build_meta.build_wheel(sys.argv[1]))"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, toolchain.python_path))
    environment[settings.CUDA_ARCHS] = arch_setting
    environment["SOURCE_DATE_EPOCH"] = str(source_date_epoch())
    with explain(f"cannot write into {output}"):
        output.mkdir(parents=True, exist_ok=True)
    # -S: no site-packages, so no plugin of setuptools that happens to be there.
    command = [sys.executable, "-S", "-c", script, str(output)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: list[str] = []
    try:
        for line in process.stdout or ():
            lines.append(line.rstrip("\n"))
            if line.startswith(_PROGRESS):
                log(lines[-1])
        status = process.wait()
    except BaseException:
        # An interrupt may have reached this process alone: the build must not go on without it and hold the tree.
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if status != 0:
        problem = next((line for line in reversed(lines) if line.startswith("error: ")), "")
        if not problem:
            sys.stderr.write("\n".join(lines) + "\n")
        raise BuildError(problem[len("error: ") :] or f"the wheel build failed: {last_error(chr(10).join(lines))}")
    return output / lines[-1][len("wheel: ") :]


# auditwheel knows only the platform tags of the machine that it believes to be on.
_AUDITWHEEL = (
    "import platform, sys; platform.machine = lambda: '{}'; from auditwheel.main import main; sys.exit(main())"
)


def repair(raw: Path, toolchain: Toolchain, output: Path) -> Path:
    """Give the wheel its manylinux tag and check it; returns its path in `output`.

    Raises BuildError if auditwheel finds that its symbols need a newer system, and if it is not fit to be released; `output` is then as it was.
    """
    machine = re.sub(r".*linux_(\w+)\.whl$", r"\1", raw.name)
    platform = f"manylinux_{settings.glibc().replace('.', '_')}_{machine}"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, toolchain.python_path))
    environment["PATH"] = os.pathsep.join((str(toolchain.patchelf.parent), environment.get("PATH", os.defpath)))
    environment["SOURCE_DATE_EPOCH"] = str(source_date_epoch())
    with explain(f"cannot write into {output}"):
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=output) as part:
            arguments = ["repair", "--plat", platform, "--wheel-dir", part, str(raw)]
            result = capture([sys.executable, "-S", "-c", _AUDITWHEEL.format(machine), *arguments], env=environment)
            made = list(Path(part).glob("*.whl"))
            if result.returncode != 0 or len(made) != 1:
                said = last_error(result.stderr + result.stdout)
                raise BuildError(f"auditwheel refuses {raw.name} as {platform}: {said}")
            normalise(made[0])
            found = problems(read_wheel(made[0]))
            if found:
                raise BuildError(f"{made[0].name} is not fit to be released: {'; '.join(found)}")
            # Wheels before it, of the same version, Python and machine, go only now.
            for stale in output.glob(f"*_{machine}.whl"):
                if stale.name.split("-")[:3] == raw.name.split("-")[:3]:
                    stale.unlink()
            return made[0].replace(output / made[0].name)


def write_index(wheels: "list[Path]", folder: Path) -> "list[Path]":
    """Lay out static package indexes (PEP 503) under `folder`; returns the folder of each, for `pip install --index-url`.

    One for each set of architectures: among versions pip would prefer one with a local label to the one with all architectures. The
    wheels lie in `folder`/wheels; `simple` leads to those with all, sm90a to those for 90a alone, and so on.
    """
    store = folder / "wheels"
    pages: dict[str, list[str]] = {}
    with explain(f"cannot write into {folder}"):
        store.mkdir(parents=True, exist_ok=True)
        for path in sorted(wheels):
            try:
                wheel = read_wheel(path)
            except ValueError as error:
                raise BuildError(str(error)) from error
            found = problems(wheel)
            if found:
                raise BuildError(f"{path.name} is not fit to be released: {'; '.join(found)}")
            data = path.read_bytes()
            (store / path.name).write_bytes(data)
            link = f"../../wheels/{quote(path.name)}#sha256={hashlib.sha256(data).hexdigest()}"
            python = html.escape(wheel.metadata()["Requires-Python"][0])
            local = wheel.metadata()["Version"][0].partition("+")[2] or "simple"
            pages.setdefault(local, []).append(f'<a href="{link}" data-requires-python="{python}">{path.name}</a><br>')
        for name, links in pages.items():
            write_page(folder / name, ['<a href="flash-kda/">flash-kda</a><br>'])
            write_page(folder / name / "flash-kda", links)
    return [folder / name for name in sorted(pages)]


def write_page(folder: Path, links: "list[str]") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"><title>flash_kda</title></head><body>\n'
    (folder / "index.html").write_text(head + "\n".join(links) + "\n</body></html>\n", encoding="utf-8")


def problems(wheel: Wheel) -> list[str]:
    """Everything that keeps a wheel from being handed to strangers, one text each; empty if it is fit.

    What holds for any wheel is checked by flash_kda.verify; here is what must be true of ours besides.
    """
    report = examine(wheel, DEVICE_CODE_LOCK)
    found = report.faults
    size = wheel.path.stat().st_size
    if size > SIZE_LIMIT:
        found.append(f"size: {size} bytes, allowed are {SIZE_LIMIT}")
    metadata = wheel.metadata()
    if "torch>=2.4" not in metadata.get("Requires-Dist", []):
        found.append(f"metadata: Requires-Dist has no torch>=2.4: {metadata.get('Requires-Dist')}")
    if metadata.get("Requires-Python") != [">=3.9"]:
        found.append(f"metadata: Requires-Python is {metadata.get('Requires-Python')}, not >=3.9")
    for file, words in LICENSES.items():
        if words not in wheel.members.get(f"{wheel.info}/licenses/{file}", b""):
            found.append(f"licenses: {file} is not in the wheel")
    for tag in sorted(wheel.tags):
        python, abi, platform = tag.split("-")
        if not re.fullmatch(r"cp3\d+", python) or abi not in (python, f"{python}t"):
            found.append(f"tag: {tag} is not for one CPython")
        if not re.fullmatch(r"manylinux_2_(17|28)_\w+|manylinux2014_\w+", platform):
            found.append(f"tag: {platform} is not manylinux with glibc 2.17 or 2.28")
    if len(wheel.modules) != 1 or not wheel.modules[0].startswith("flash_kda/_native.cpython-"):
        found.append(f"content: expected one module flash_kda/_native, found {wheel.modules}")
    for name in wheel.modules:
        foreign = [library for library in needed(wheel.members[name]) if not SYSTEM_LIBRARIES.fullmatch(library)]
        if foreign:
            found.append(f"libraries: {name} needs {foreign}")
        local = LOCAL_PATH.search(wheel.members[name])
        if local:
            found.append(f"content: {name} holds the path {local[0].decode(errors='replace')}")
    for name in wheel.members:
        if not name.startswith(("flash_kda/", wheel.info)) or name.endswith((".pyc", ".cpp", ".o", ".cubin", ".ptx")):
            found.append(f"content: {name} does not belong into the wheel")
    if report.build and report.build["toolchain_lock"] != toolchain_digest():
        found.append(f"build record: it is of another toolchain.lock, {report.build['toolchain_lock']}")
    return found


def needed(module: bytes) -> list[str]:
    """Libraries that a module opens; none if it is no module, which is a fault of its own."""
    try:
        return elf.Library(module).needed
    except ValueError:
        return []
