"""Decides which architectures a build holds: FLASH_KDA_CUDA_ARCHS, the visible GPUs, and the reason."""

import ctypes
import re
from dataclasses import dataclass

from tools import settings
from tools.errors import BuildError
from tools.units import ARCH_BY_NAME, ARCHS, UNITS, Unit


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows."""

    name: str
    major: int
    minor: int


@dataclass(frozen=True)
class Plan:
    """Architectures to build, in the order of units.ARCHS, and why."""

    setting: str  # auto | all | the names asked for
    archs: tuple[str, ...]
    reasons: tuple[str, ...]

    def jobs(self, units: tuple[Unit, ...] = UNITS) -> list[tuple[Unit, str]]:
        """What to compile: each unit for each of its architectures in the plan."""
        return [(unit, arch) for unit in units for arch in self.archs if arch in unit.archs]


def allowed() -> str:
    return "auto, all, or a comma list of " + ", ".join(arch.name for arch in ARCHS)


def plan(setting: str = "", gpus: "list[Gpu] | str | None" = None) -> Plan:
    """The plan for a setting (empty: the environment's, else auto). `gpus` replaces asking the driver.

    Raises BuildError for a token that is unknown, without its suffix, unsupported or mixed with auto or all.
    """
    said = f"architectures {setting}" if setting else f"{settings.CUDA_ARCHS}={settings.text(settings.CUDA_ARCHS)}"
    setting = (setting or settings.text(settings.CUDA_ARCHS) or "auto").strip()
    tokens = [token.strip() for token in setting.split(",")]
    if setting == "all":
        return Plan("all", tuple(arch.name for arch in ARCHS), ("all supported architectures were asked for",))
    if setting == "auto":
        return _auto(visible_gpus() if gpus is None else gpus)
    for token in tokens:
        if token not in ARCH_BY_NAME:
            raise BuildError(f"{said}: {_objection(token)}; allowed: {allowed()}")
    names = tuple(arch.name for arch in ARCHS if arch.name in tokens)
    return Plan(
        ",".join(names), names, tuple(f"sm_{name} was asked for ({ARCH_BY_NAME[name].serves})" for name in names)
    )


def _objection(token: str) -> str:
    if token in ("auto", "all"):
        return f"'{token}' stands alone"
    bare = re.sub(r"^(sm|compute)_?", "", token.lower()).replace(".", "")
    digits = re.sub(r"[a-z]+$", "", bare)
    if not re.fullmatch(r"\d{2,3}[a-z]?", bare):
        return f"'{token}' is not an architecture"
    same = [arch.name for arch in ARCHS if re.sub(r"[a-z]$", "", arch.name) == digits]
    if same:
        return f"'{token}' is not a supported form; did you mean {' or '.join(same)}?"
    serving = [arch.name for arch in ARCHS if arch.runs_on(int(digits[:-1]), int(digits[-1]))]
    if serving:
        return f"'{token}' is served by {serving[0]}"
    return f"'{token}' is not supported"


def _auto(gpus: "list[Gpu] | str") -> Plan:
    every = tuple(arch.name for arch in ARCHS)
    if isinstance(gpus, str):
        return Plan("auto", every, (f"no visible GPU ({gpus}): all supported architectures",))
    if not gpus:
        return Plan("auto", every, ("no visible GPU: all supported architectures",))
    names, reasons = set(), []
    for index, gpu in enumerate(gpus):
        label = f"GPU {index} is {gpu.name} (compute capability {gpu.major}.{gpu.minor})"
        arch = next((arch.name for arch in ARCHS if arch.runs_on(gpu.major, gpu.minor)), None)
        if arch:
            names.add(arch)
            reasons.append(f"{label}: sm_{arch}")
        else:
            reasons.append(f"{label}: not supported, nothing is built for it")
    if not names:
        return Plan("auto", every, (*reasons, "no visible GPU is supported: all supported architectures"))
    return Plan("auto", tuple(name for name in every if name in names), tuple(reasons))


def visible_gpus(library: str = "libcuda.so.1") -> "list[Gpu] | str":
    """The GPUs that the driver shows, or the reason why it cannot be asked."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return "no NVIDIA driver"
    try:
        status = cuda.cuInit(0)
        if status == 100:  # CUDA_ERROR_NO_DEVICE
            return []
        if status != 0:
            return f"the driver does not start, error {status}"
        count, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
        gpus = []
        if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return "the driver does not count its devices"
        for index in range(count.value):
            device = ctypes.c_int()
            capability = []
            ok = (
                cuda.cuDeviceGet(ctypes.byref(device), index) == 0
                and cuda.cuDeviceGetName(name, len(name), device) == 0
            )
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
                ok = ok and cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0
                capability.append(value.value)
            if not ok:
                return f"the driver does not describe device {index}"
            gpus.append(Gpu(name.value.decode(errors="replace"), *capability))
        return gpus
    except AttributeError as error:
        return f"{library} is not a CUDA driver ({error})"
