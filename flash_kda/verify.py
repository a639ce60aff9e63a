"""What ``python -m flash_kda verify WHEEL`` finds out from the file alone: no CUDA, no torch, nothing is imported or run.

Two questions. Does the wheel keep what its name and metadata promise (any wheel for Linux)? And, of ours: is the machine code
in it, byte for byte, what the build record in it and a ``device-code.lock`` say?
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import re
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

from flash_kda import elf

# Libraries that every system of a manylinux tag has: PEP 513, 571, 599 and 600.
_SYSTEM = re.compile(
    r"lib(c|m|dl|rt|util|nsl|resolv|pthread|gcc_s|stdc\+\+|z|expat|X11|Xext|Xrender|ICE|SM|GL)\.so\.\d+"
    r"|lib(glib|gobject|gthread)-2\.0\.so\.0|ld-linux.*|ld64\.so\.\d"
)
_GLIBC_OF_OLD_TAGS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
# Libraries that other packages bring, and the names of those. {} is the CUDA major in the library's own name.
_PROVIDERS = (
    (re.compile(r"libcudart\.so\.(\d+)"), "nvidia-cuda-runtime-cu{}|nvidia-cuda-runtime"),
    (re.compile(r"libnvrtc\.so\.(\d+)"), "nvidia-cuda-nvrtc-cu{}|nvidia-cuda-nvrtc"),
    (re.compile(r"libcublas(?:Lt)?\.so\.(\d+)"), "nvidia-cublas-cu{}|nvidia-cublas"),
    (re.compile(r"libnvJitLink\.so\.(\d+)"), "nvidia-nvjitlink-cu{}|nvidia-nvjitlink"),
    (re.compile(r"libcudnn\w*\.so\.\d+"), r"nvidia-cudnn-cu\d+"),
    (re.compile(r"libnccl\.so\.\d+"), r"nvidia-nccl-cu\d+"),
    (re.compile(r"lib(?:torch|c10)\w*\.so"), "torch"),
)


class Wheel(NamedTuple):
    """A wheel read into memory."""

    path: Path
    members: dict[str, bytes]

    @property
    def info(self) -> str:
        """Name of the .dist-info folder."""
        return next(name.split("/")[0] for name in self.members if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))

    def metadata(self, file: str = "METADATA") -> dict[str, list[str]]:
        """Headers of METADATA or WHEEL, each a list since some repeat."""
        message = Parser().parsestr(self.members[f"{self.info}/{file}"].decode(errors="replace"))
        return {key: [str(value) for value in message.get_all(key, [])] for key in set(message)}

    @property
    def modules(self) -> list[str]:
        """Files that are named as shared libraries."""
        return [name for name in self.members if re.search(r"\.so(\.\d+)*$", name)]

    @property
    def tags(self) -> set[str]:
        """python-abi-platform, each as WHEEL spells it, out of the file's name."""
        parts = self.path.name[: -len(".whl")].split("-")[-3:]
        return {"-".join(tag) for tag in itertools.product(*(part.split(".") for part in parts))}


def read_wheel(path: Path) -> Wheel:
    """Raises ValueError, in one line, for what is no wheel."""
    if not re.fullmatch(r"[^-]+-[^-]+(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl", path.name):
        raise ValueError(f"{path.name} is not named as a wheel: expected NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for file in ("METADATA", "WHEEL", "RECORD"):
        if not any(re.fullmatch(rf"[^/]+\.dist-info/{file}", name) for name in members):
            raise ValueError(f"{path.name} is no wheel: it has no .dist-info/{file}")
    return Wheel(path, members)


class Code(NamedTuple):
    """One CUDA binary in a wheel; ``unit`` and ``arch`` are empty if the build record does not list it."""

    module: str
    unit: str
    arch: str
    size: int
    sha256: str
    status: str


class Report(NamedTuple):
    """``faults`` is empty for a wheel that keeps its promises; ``open`` says what could not be checked."""

    wheel: str
    tags: list[str]
    modules: dict[str, str]
    build: dict[str, Any] | None
    code: list[Code]
    faults: list[str]
    open: list[str]


def verify(path: Path, lock: Path | None = None) -> Report:
    """Check a wheel; ``lock`` is the device-code.lock to compare machine code with. Raises ValueError if either is unreadable."""
    return examine(read_wheel(path), lock)


def examine(wheel: Wheel, lock: Path | None = None) -> Report:
    """verify(), for a wheel that was read before."""
    faults = [*_archive_faults(wheel), *_tag_faults(wheel)]
    modules: dict[str, str] = {}
    for name, data in wheel.members.items():
        if data.startswith(b"\x7fELF") or name in wheel.modules:
            try:
                library = elf.Library(data)
                modules[name] = _describe(library)
                faults += _library_faults(wheel, name, library)
            except (ValueError, KeyError, IndexError) as error:
                faults.append(f"content: {name} is not a shared library that can be read: {error}")
                modules[name] = "not readable"
    build, code, more, unknown = _device_code(wheel, lock)
    return Report(wheel.path.name, sorted(wheel.tags), modules, build, code, faults + more, unknown)


def _describe(library: elf.Library) -> str:
    major, minor = library.glibc
    needs = f"glibc {major}.{minor} or newer" if major else "any glibc"
    return f"{library.machine}, {needs}, needs {' '.join(library.needed) or 'no library'}"


def _archive_faults(wheel: Wheel) -> Iterator[str]:
    """Name, version and RECORD against the content."""
    metadata = wheel.metadata()
    name, version = wheel.path.name.split("-")[:2]
    stated = (metadata.get("Name", ["none"])[0], metadata.get("Version", ["none"])[0])
    if _normal(name) != _normal(stated[0]) or version != stated[1].replace("-", "_"):
        yield f"name: the file says {name} {version}, its METADATA {stated[0]} {stated[1]}"
    rows = {
        row[0]: row[1]
        for row in csv.reader(io.StringIO(wheel.members[f"{wheel.info}/RECORD"].decode()))
        if len(row) > 1
    }
    for file, data in wheel.members.items():
        signature = re.fullmatch(r"[^/]+\.dist-info/RECORD(\.jws|\.p7s)?", file)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if not signature and rows.get(file) != f"sha256={digest}":
            yield f"RECORD: {file} is not listed with its hash"
        if file.startswith("/") or ".." in file.split("/"):
            yield f"content: {file} would be written outside of the installation"
    for file in rows.keys() - wheel.members.keys():
        yield f"RECORD: {file} is listed and not there"


def _tag_faults(wheel: Wheel) -> Iterator[str]:
    """The tags against WHEEL and against the names of the modules."""
    listed = set(wheel.metadata("WHEEL").get("Tag", []))
    if listed != wheel.tags:
        yield f"tag: the file's name says {' '.join(sorted(wheel.tags))}, its WHEEL {' '.join(sorted(listed)) or 'nothing'}"
    for tag in sorted(wheel.tags):
        python, abi, platform = tag.split("-")
        for name in wheel.modules:
            made_for = re.search(r"\.cpython-(\d+t?)-?[\w-]*\.so$", name)
            if platform == "any":
                yield f"tag: {tag} is for any machine, and {name} is machine code"
            elif made_for and abi == "abi3":
                yield f"tag: {tag} is for every CPython from {python} on, and {name} for cp{made_for[1]} alone (no abi3 module)"
            elif made_for and abi != f"cp{made_for[1]}":
                yield f"tag: {name} is of another Python than {tag}: cp{made_for[1]}"


def _library_faults(wheel: Wheel, name: str, library: elf.Library) -> Iterator[str]:
    """What a shared library needs, against tags and metadata."""
    for platform in sorted({tag.split("-")[2] for tag in wheel.tags}):
        machine = next((machine for machine in elf.MACHINES.values() if platform.endswith(f"_{machine}")), None)
        if machine and machine != library.machine:
            yield f"tag: {platform} is for {machine}, and {name} for {library.machine}"
        promised = _glibc_of_tag(platform)
        if promised and library.glibc > promised:
            symbol = "GLIBC_{}.{}".format(*library.glibc)
            yield f"tag: {platform} promises glibc {promised[0]}.{promised[1]}, and {name} needs {symbol}"
    inside = {member.rsplit("/", 1)[-1] for member in wheel.members}
    requirements = [text for text in wheel.metadata().get("Requires-Dist", []) if "extra ==" not in text]
    required = {_normal(re.split(r"[\s;\[(<>=!~]", text, maxsplit=1)[0]) for text in requirements}
    for needed in library.needed:
        if _SYSTEM.fullmatch(needed) or needed in inside:
            continue
        if needed == "libcuda.so.1":
            yield f"libraries: {name} needs libcuda.so.1 to load, so its import fails where there is no NVIDIA driver"
            continue
        provider = _provider(needed)
        if provider is None:
            yield f"libraries: {name} needs {needed}, which is neither in the wheel nor on every system"
        elif not any(re.fullmatch(provider, package) for package in required):
            yield f"libraries: {name} needs {needed}, which is not in the wheel, and METADATA requires no {provider.replace('|', ' or ')}"
    for folder in library.run_path:
        if not folder.startswith("$ORIGIN"):
            yield f"libraries: {name} searches {folder}, a folder of the machine that built it"
    if library.executable_stack:
        yield f"libraries: {name} asks for an executable stack"


def _provider(library: str) -> str | None:
    """A pattern of the packages that bring a library."""
    for pattern, packages in _PROVIDERS:
        match = pattern.match(library)
        if match:
            return packages.format(*match.groups())
    return None


def _glibc_of_tag(platform: str) -> tuple[int, int] | None:
    versioned = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return (int(versioned[1]), int(versioned[2])) if versioned else _GLIBC_OF_OLD_TAGS.get(platform.split("_")[0])


def build_record(module: bytes) -> dict[str, Any] | None:
    """The build record that flash_kda's module carries, or None."""
    at = module.find(b'{"archs": [')
    if at < 0:
        return None
    try:
        record = json.loads(module[at : module.index(b"\0", at)])
    except ValueError:
        return None
    return record if isinstance(record, dict) and "toolchain_lock" in record else None


def label(archs: list[str]) -> str:
    """Local version of a wheel that holds only some of the architectures: "sm90a.sm100a"."""
    return ".".join(f"sm{arch}" for arch in archs)


def _device_code(wheel: Wheel, lock: Path | None) -> tuple[dict[str, Any] | None, list[Code], list[str], list[str]]:
    """Build record, CUDA binaries, faults, and what could not be checked."""
    locked = read_lock(lock) if lock else None
    build: dict[str, Any] | None = None
    code: list[Code] = []
    faults: list[str] = []
    for module in wheel.modules:
        data = wheel.members[module]
        record = build_record(data)
        build = build or record
        listed = {cubin["sha256"]: cubin for cubin in record["cubins"]} if record else {}
        for image in elf.cubins(data):
            digest = hashlib.sha256(image.data).hexdigest()
            entry = listed.pop(digest, {})
            unit, arch = entry.get("unit", ""), entry.get("arch", "")
            status = "as in the build record"
            if record and not entry:
                status = "not in the build record"
                faults.append(
                    f"device code: {module} holds a cubin for sm_{image.sm}, sha256 {digest}, that its build record does not list"
                )
            elif not record:
                status = "no build record"
            elif arch[:-1] != str(image.sm):
                status = "another architecture"
                faults.append(f"device code: the record says {unit} {arch}, the cubin itself sm_{image.sm}")
            elif locked is not None:
                wanted = locked.get(f"{unit}/{arch}")
                status = "as in the lock" if wanted == digest else "NOT AS IN THE LOCK"
                if wanted != digest:
                    faults.append(
                        f"device code: {unit} {arch} has sha256 {digest}, and the lock says {wanted or 'nothing of it'}"
                    )
            code.append(Code(module, unit, arch, len(image.data), digest, status))
        faults += [
            f"device code: the build record lists {c['unit']} {c['arch']}, and {module} holds no such cubin"
            for c in listed.values()
        ]
    unknown = []
    if build:
        faults += _build_faults(wheel, build, code, locked)
        if locked is None:
            unknown.append("machine code against device-code.lock: name one with --lock")
    elif _normal(wheel.path.name.split("-")[0]) == "flash-kda":
        faults.append("device code: no build record in the wheel")
    else:
        unknown.append("machine code: this wheel has no build record of flash_kda")
    return build, code, faults, unknown


def _build_faults(
    wheel: Wheel, build: dict[str, Any], code: list[Code], locked: dict[str, str] | None
) -> Iterator[str]:
    """The build record against the file's name and the machine code."""
    version, _, local = wheel.metadata().get("Version", [""])[0].partition("+")
    if build.get("version") != version:
        yield f"build record: it is of version {build.get('version')}, and the wheel of {version}"
    archs = list(build["archs"])
    held = {entry.arch for entry in code if entry.arch}
    if held != set(archs):
        yield f"build record: it says {', '.join(archs)}, and the machine code is for {', '.join(sorted(held)) or 'nothing'}"
    if local and local != label(archs):
        yield f"name: the version says {local}, and the machine code is for {', '.join(archs)}"
    missing = set(locked or ()) - {f"{entry.unit}/{entry.arch}" for entry in code}
    if not local and missing:
        yield f"name: a version without +sm... has all architectures, and {', '.join(sorted(missing))} is missing"
    if build.get("locked") is not True:
        yield "build record: the machine code is not that of device-code.lock (FLASH_KDA_ALLOW_UNLOCKED)"
    if build.get("dirty"):
        yield f"build record: built from a changed tree (commit {build.get('commit')}, dirty)"


def read_lock(path: Path) -> dict[str, str]:
    """sha256 by "unit/arch" out of a device-code.lock."""
    try:
        return {
            f"{c['unit']}/{c['arch']}": str(c["sha256"]) for c in json.loads(path.read_text(encoding="utf-8"))["cubins"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a device-code.lock: {type(error).__name__}: {error}") from error


def describe(report: Report) -> Iterator[str]:
    """The report in lines of text."""

    def row(name: str, text: str) -> str:
        return f"{name:<12}{text}"

    yield row("wheel", report.wheel)
    for name, text in report.modules.items():
        yield row("module", f"{name}: {text}")
    if report.build:
        build = report.build
        commit = build.get("commit", "not given") + (", dirty" if build.get("dirty") else "")
        yield row(
            "build",
            f"version {build.get('version')}, setting {build.get('setting')}, commit {commit}, {build.get('host_compiler')}",
        )
        yield row("", f"toolchain.lock {build.get('toolchain_lock')}")
        yield row("", ", ".join(f"{name} {version}" for name, version in build.get("toolchain", {}).items()))
    for code in report.code:
        yield row(
            "cubin", f"{code.unit or '?'} {code.arch or '?'}, {code.size} bytes, sha256 {code.sha256}, {code.status}"
        )
    for text in report.open:
        yield row("not checked", text)
    for text in report.faults:
        yield row("fault", text)
    count = len(report.faults)
    yield row("verdict", f"UNFIT: {count} fault{'s' * (count > 1)}" if count else "FIT: the wheel keeps its promises")


def _normal(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
