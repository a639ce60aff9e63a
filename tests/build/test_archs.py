"""The architecture planner: what is built, why, and what is refused."""

import ctypes
import subprocess
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import archs, settings
from tools.archs import Gpu, plan
from tools.errors import BuildError
from tools.units import ARCH_BY_NAME, ARCHS, UNITS

ALL = ("90a", "100a", "103a", "120a", "120f")


def test_the_supported_architectures() -> None:
    assert tuple(arch.name for arch in ARCHS) == ALL


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [(9, 0, "90a"), (10, 0, "100a"), (10, 3, "103a"), (12, 0, "120a"), (12, 1, "120f")],
)
def test_auto_takes_the_most_specific_form_for_each_gpu(major: int, minor: int, name: str) -> None:
    chosen = plan("auto", [Gpu("a GPU", major, minor)])
    assert chosen.archs == (name,)
    assert f"{major}.{minor}" in chosen.reasons[0]
    assert f"sm_{name}" in chosen.reasons[0]


def test_auto_with_several_gpus_takes_each_once_in_table_order() -> None:
    gpus = [Gpu("B200", 10, 0), Gpu("H200", 9, 0), Gpu("H200", 9, 0)]
    assert plan("auto", gpus).archs == ("90a", "100a")


@pytest.mark.parametrize("gpus", [[], "no NVIDIA driver"])
def test_auto_without_a_visible_gpu_builds_all_and_says_so(gpus: "list[Gpu] | str") -> None:
    chosen = plan("auto", gpus)
    assert chosen.archs == ALL
    assert "no visible GPU" in chosen.reasons[0]


def test_auto_names_a_gpu_that_nothing_is_built_for() -> None:
    chosen = plan("auto", [Gpu("A100", 8, 0), Gpu("H200", 9, 0)])
    assert chosen.archs == ("90a",)
    assert "A100" in chosen.reasons[0]
    assert "not supported" in chosen.reasons[0]
    assert plan("auto", [Gpu("A100", 8, 0)]).archs == ALL


def test_a_list_is_sorted_and_without_repeats() -> None:
    chosen = plan(" 120f, 90a,90a ")
    assert chosen.archs == ("90a", "120f")
    assert chosen.setting == "90a,120f"
    assert plan("all").archs == ALL


def test_the_environment_is_the_default_and_empty_means_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CUDA_ARCHS, "103a")
    assert plan().archs == ("103a",)
    assert plan("90a").archs == ("90a",)
    monkeypatch.setenv(settings.CUDA_ARCHS, "  ")
    assert plan("", [Gpu("H200", 9, 0)]).setting == "auto"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("90", "did you mean 90a"),
        ("9.0a", "did you mean 90a"),
        ("sm_90a", "did you mean 90a"),
        ("120", "did you mean 120a or 120f"),
        ("100f", "did you mean 100a"),
        ("121", "served by 120f"),
        ("121a", "served by 120f"),
        ("80", "'80' is not supported"),
        ("75", "'75' is not supported"),
        ("hopper", "not an architecture"),
        ("native", "not an architecture"),
        ("90a;100a", "not an architecture"),
        ("90a,", "'' is not an architecture"),
        ("90a,all", "'all' stands alone"),
        ("auto,90a", "'auto' stands alone"),
        ("90a,80", "'80' is not supported"),
    ],
)
def test_other_tokens_are_refused_with_what_is_allowed(setting: str, says: str) -> None:
    with pytest.raises(BuildError) as error:
        plan(setting)
    assert says in str(error.value)
    assert f"allowed: auto, all, or a comma list of {', '.join(ALL)}" in str(error.value)


@given(st.text(max_size=12))
def test_any_text_gives_supported_architectures_or_one_line(setting: str) -> None:
    try:
        chosen = plan(setting, "no NVIDIA driver")
    except BuildError as refusal:
        lines, built = str(refusal).splitlines(), set()
    else:
        lines, built = [chosen.setting], set(chosen.archs)
    assert len(lines) == 1
    assert built <= set(ARCH_BY_NAME)


def test_every_unit_is_compiled_for_its_own_architectures_only() -> None:
    jobs = plan("all").jobs()
    assert sorted(jobs, key=str) == sorted(((unit, arch) for unit in UNITS for arch in unit.archs), key=str)
    assert {unit.name for unit, _ in plan("100a").jobs()} == {unit.name for unit in UNITS if "100a" in unit.archs}
    assert {arch for unit in UNITS for arch in unit.archs} == set(ALL)


def test_a_missing_driver_and_a_library_that_is_none() -> None:
    assert archs.visible_gpus("libthere-is-none.so.1") == "no NVIDIA driver"
    assert "not a CUDA driver" in archs.visible_gpus("libc.so.6")


class FakeDriver:
    """What the planner calls of libcuda, for two GPUs."""

    capabilities = ((9, 0), (12, 1))

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count) -> int:  # type: ignore[no-untyped-def]
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device, index: int) -> int:  # type: ignore[no-untyped-def]
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size: int, device) -> int:  # type: ignore[no-untyped-def]
        name.value = b"GPU %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:  # type: ignore[no-untyped-def]
        value._obj.value = self.capabilities[device.value][attribute - 75]
        return 0


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, [Gpu("GPU 0", 9, 0), Gpu("GPU 1", 12, 1)]),
        (100, []),
        (803, "the driver does not start, error 803"),
    ],
)
def test_the_driver_is_asked_without_torch(monkeypatch: pytest.MonkeyPatch, status: int, expected: object) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(status))
    assert archs.visible_gpus() == expected


def test_a_bad_setting_stops_the_command_before_anything_is_compiled(
    command: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    result = command("module", FLASH_KDA_CUDA_ARCHS="90", FLASH_KDA_CACHE_DIR="/sys/no-cache-is-touched")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: FLASH_KDA_CUDA_ARCHS=90: '90' is not a supported form")
    assert result.stderr.count("\n") == 1


def test_plan_explains_and_builds_nothing(command: Callable[..., "subprocess.CompletedProcess[str]"], tree) -> None:  # type: ignore[no-untyped-def]
    before = sorted(tree.rglob("*"))
    result = command("plan", FLASH_KDA_CUDA_ARCHS="90a,120f")
    assert result.returncode == 0, result.stderr
    for word in ("90a, 120f", "was asked for", "cubins", "toolchain", "about", "FLASH_KDA_CUDA_ARCHS=90a,120f"):
        assert word in result.stdout
    assert [path for path in sorted(tree.rglob("*")) if "__pycache__" not in str(path)] == before
