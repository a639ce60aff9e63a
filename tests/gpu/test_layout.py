"""What is read in place, what is written, and what is left alone. The bodies run on the CPU path too (tests/cpu)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402

import flash_kda  # noqa: E402


def test_slices_of_a_fused_projection() -> None:
    cases.check_fused_slices("cuda", 300, 6)


def test_other_layouts() -> None:
    cases.check_layouts("cuda")


def test_empty_calls() -> None:
    cases.check_empty_calls("cuda")


def test_state_in_place() -> None:
    cases.check_state_in_place("cuda")


def test_odd_offsets() -> None:
    cases.check_odd_offsets("cuda")


def test_offset_dtypes() -> None:
    cases.check_offset_dtypes("cuda")


@pytest.mark.parametrize("cuts", [[512, 1024], [1, 18, 500]], ids=str)
def test_split_call(cuts: list[int]) -> None:
    cases.check_split_call("cuda", 1500, cuts)


def test_bound_and_scale_are_used() -> None:
    problem = cases.make("cuda", [200], 2, cases.STRONG, initial=cases.FP32)
    out, _ = cases.run(problem)
    doubled, _ = cases.run(problem.replace(scale=2 * problem.scale))
    assert cases.distance(doubled, 2 * out.double()) < 4e-3
    weaker, _ = cases.run(problem.replace(lower_bound=-0.5))
    assert cases.distance(weaker, out) > 0.1


@pytest.mark.parametrize("split", ["0", "auto"])
def test_no_hidden_allocation(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_SPLIT", split)
    problem, _ = cases.fused_slices("cuda", cases.make("cuda", None, 8, batch=(2, 1100), initial=cases.FP32))
    out = torch.empty(2, 1100, 8, cases.K, dtype=cases.BF16, device="cuda")
    state = torch.empty(2, 8, cases.K, cases.K, device="cuda")
    workspace = flash_kda.get_workspace_size(2 * 1100, 8, 2)
    assert (workspace > 0) == (split == "auto")
    cases.call(problem, out, state)  # loads the module
    torch.cuda.synchronize()

    def asked() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return int(stats["allocation.all.allocated"]), int(stats["requested_bytes.all.allocated"])

    free, (times, size) = torch.cuda.mem_get_info()[0], asked()
    for _ in range(20):
        cases.call(problem, out, state)
    once = 1 if workspace else 0
    assert asked() == (times + 20 * once, size + 20 * workspace), (
        "torch's allocator was asked for more than the workspace"
    )
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free, "the driver was asked for memory"
    cases.call(problem, None, state)
    assert asked()[0] == times + 21 * once + 1, "out=None must allocate out and nothing else"
