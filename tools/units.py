"""What is compiled for which chips: the architectures of matrix.json, and the one table of kernel units."""

from dataclasses import dataclass, field

from flash_kda import device_code
from tools.matrix import MATRIX


@dataclass(frozen=True)
class Arch:
    """One target of the device compiler and the GPUs that its machine code is meant for."""

    name: str  # as in sm_<name>
    serves: str

    def runs_on(self, major: int, minor: int) -> bool:
        return device_code.runs(self.name, major, minor)


# Most specific first: the loader takes the first entry that fits the device.
ARCHS = tuple(Arch(name, serves) for name, serves in MATRIX.archs.items())
ARCH_BY_NAME = {arch.name: arch for arch in ARCHS}


@dataclass(frozen=True)
class Unit:
    """One kernel source, compiled once for each of its architectures."""

    name: str
    source: str  # relative to csrc
    archs: tuple[str, ...]
    options: tuple[str, ...] = ()  # for NVRTC, besides those of tools/device.py
    spills_allowed: frozenset[str] = field(default_factory=frozenset)  # entry points that may spill registers


UNITS = (
    Unit(
        "sm90",
        "kernels/sm90/forward.cu",
        ("90a",),
        # Some words that are needed once an item, and where states are chained; none in the loops over chunks.
        spills_allowed=frozenset(
            {"flash_kda_forward_sm90_general", "flash_kda_segments_sm90", "flash_kda_segments_sm90_general"}
        ),
    ),
    Unit(
        "portable",
        "kernels/portable/forward.cu",
        tuple(arch.name for arch in ARCHS),
        # Likewise.
        spills_allowed=frozenset(
            f"flash_kda_{name}"
            for width in ("wide", "narrow")
            for name in (
                f"forward_portable_{width}_general",
                f"segments_portable_{width}",
                f"segments_portable_{width}_general",
            )
        ),
    ),
)
UNIT_BY_NAME = {unit.name: unit for unit in UNITS}
