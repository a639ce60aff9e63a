"""Which machine code this installation carries, for which chips, and which of it a device would run.

Needs neither torch nor a driver: without a driver there are simply no devices.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = [
    "Choice",
    "Cubin",
    "Gpu",
    "build_record",
    "capabilities",
    "choose",
    "embedded",
    "gpus",
    "native",
    "runs",
    "serves",
]


class Cubin(NamedTuple):
    """One embedded binary: a kernel source (``unit``) compiled for one architecture (``arch``, such as "90a")."""

    unit: str
    arch: str
    sha256: str
    size: int  # bytes


class Gpu(NamedTuple):
    """A device as the driver describes it; ``ordinal`` counts as CUDA and torch do (after CUDA_VISIBLE_DEVICES)."""

    ordinal: int
    name: str
    major: int
    minor: int
    sm_count: int
    total_memory: int  # bytes

    @property
    def capability(self) -> str:
        return f"{self.major}.{self.minor}"


class Choice(NamedTuple):
    """What a device would run: ``kernel``, an entry point of ``cubin``; or None twice. ``reason`` says why, either way."""

    kernel: str | None
    cubin: Cubin | None
    reason: str


_module: ModuleType | None = None


def native() -> ModuleType:
    """The compiled module.

    Raises:
        RuntimeError: if it is missing or does not load, with the reason and the cure.
    """
    global _module
    if _module is None:
        try:
            from flash_kda import _native
        except ImportError as error:
            raise RuntimeError(_why_no_module(error)) from error
        _module = _native
    return _module


def _why_no_module(error: ImportError) -> str:
    here = Path(__file__).resolve().parent
    if isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error):
        others = sorted(path.name for path in here.glob("_native*.so"))
        if others:
            return (
                f"flash_kda's compiled module does not fit this Python: found {', '.join(others)} in {here}. "
                "Install the wheel for this Python version, or build again."
            )
        return (
            f"flash_kda's compiled module is missing from {here}: this is a source tree that was not built. "
            "Leave this folder if flash_kda is installed; else install the wheel, or build in place with `python3 -m tools module`."
        )
    return f"flash_kda's compiled module is there but does not load: {error}"


def embedded() -> list[Cubin]:
    """The cubins in this installation. Raises RuntimeError without the compiled module."""
    return [Cubin(**entry) for entry in native().embedded()]


def build_record() -> dict[str, Any]:
    """What the module was built from and with: version, toolchain, and each cubin's digest and resources.

    Raises RuntimeError without the compiled module.
    """
    record: dict[str, Any] = json.loads(native().build_record())
    return record


def gpus() -> list[Gpu]:
    """The devices that the driver shows; none without a driver. Raises RuntimeError without the compiled module."""
    module = native()
    found = []
    for ordinal in range(module.device_count()):
        info = module.device_info(ordinal)
        found.append(Gpu(ordinal, info["name"], info["major"], info["minor"], info["sm_count"], info["total_memory"]))
    return found


def choose(device: int = 0) -> Choice:
    """The kernel that GPU ``device`` would run, or why there is none. Never raises.

    The best that fits, unless the environment variable FLASH_KDA_KERNEL names another (a device keeps the kernel of its
    first call).
    """
    try:
        module = native()
    except RuntimeError as error:
        return Choice(None, None, str(error))
    driver = module.driver()
    if not driver["loaded"]:
        return Choice(None, None, f"no CUDA driver: {driver['reason']}")
    count = module.device_count()
    if not 0 <= device < count:
        return Choice(None, None, f"no device {device}: the driver shows {count}")
    try:
        chosen = module.select(device)
    except RuntimeError as error:
        return Choice(None, None, str(error))
    forced = os.environ.get("FLASH_KDA_KERNEL")
    reason = (
        f"FLASH_KDA_KERNEL={forced} asks for it" if forced and forced != "auto" else "the best that fits this device"
    )
    for cubin in embedded():
        if cubin.sha256 == chosen["sha256"] and cubin.unit == chosen["unit"] and cubin.arch == chosen["arch"]:
            return Choice(chosen["kernel"], cubin, reason)
    return Choice(None, None, f"the compiled module chose {chosen['unit']} {chosen['arch']}, which it does not list")


def capabilities(arch: str) -> tuple[int, int, int]:
    """(major, first minor, last minor) of the compute capabilities that code for ``arch`` runs on.

    "a" code runs on exactly its own capability, "f" code on later ones of its major too (CUDA C++ Programming Guide, family-specific
    architecture features).
    """
    major, minor = int(arch[:-2]), int(arch[-2])
    return major, minor, 9 if arch[-1] == "f" else minor


def serves(arch: str) -> str:
    """capabilities() in words: "9.0" for "90a", "12.0 and later 12.x" for "120f"."""
    major, first, last = capabilities(arch)
    return f"{major}.{first}" + (f" and later {major}.x" if last > first else "")


def runs(arch: str, major: int, minor: int) -> bool:
    """Whether code for ``arch`` runs on a device of compute capability ``major.minor``."""
    arch_major, first, last = capabilities(arch)
    return major == arch_major and first <= minor <= last
