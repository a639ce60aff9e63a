"""What is compiled for which chips: the one table of architectures and the one table of kernel units."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arch:
    """One target of the device compiler and the GPUs that its machine code runs on."""

    name: str  # as in sm_<name>
    major: int
    minor_first: int
    minor_last: int
    serves: str

    def runs_on(self, major: int, minor: int) -> bool:
        return major == self.major and self.minor_first <= minor <= self.minor_last


# Most specific first: the loader takes the first entry that fits the device.
ARCHS = (
    Arch("90a", 9, 0, 0, "Hopper: H100, H200, GH200"),
    Arch("100a", 10, 0, 0, "Blackwell: B200, GB200"),
    Arch("103a", 10, 3, 3, "Blackwell Ultra: B300, GB300"),
    Arch("120a", 12, 0, 0, "Blackwell: RTX 50, RTX PRO"),
    Arch("120f", 12, 0, 1, "the sm_12x family, for GB10 (sm_121)"),
)
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
    Unit("sm90", "kernels/sm90/forward.cu", ("90a",)),
    Unit("portable", "kernels/portable/forward.cu", tuple(arch.name for arch in ARCHS)),
)
UNIT_BY_NAME = {unit.name: unit for unit in UNITS}
