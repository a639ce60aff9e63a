"""Every form of input besides the usual one: against fp64, and without a copy. The bodies run on the CPU path too (tests/cpu)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
from kda_cases import BF16, FORM_LIMIT, FP32, LIMIT, STRONG, WEAK, WEAKEST  # noqa: E402

LENGTHS = [517, 0, 16, 77, 1, 300]
NAMES = list(cases.forms("cpu", [5]))


@pytest.fixture(scope="module")
def forms() -> dict[str, cases.Problem]:
    return cases.forms("cuda", LENGTHS)


@pytest.mark.parametrize("name", NAMES)
def test_form(name: str, forms: dict[str, cases.Problem]) -> None:
    cases.check_against_oracle(f"form: {name}", forms[name], FORM_LIMIT)


@pytest.mark.parametrize("name", NAMES)
def test_form_of_one_long_sequence(name: str) -> None:
    """Few heads and many tokens: cut into segments."""
    problem = cases.forms("cuda", [3000])[name]
    problem.cu_seqlens = None
    cases.check_against_oracle(f"one sequence, form: {name}", problem, FORM_LIMIT)


@pytest.mark.parametrize("gate", [STRONG, WEAK, WEAKEST], ids=cases.REGIME.get)
def test_ways_to_say_the_same(gate: float) -> None:
    """The bounded gate computed outside is as accurate as inside, and what is merely said otherwise gives the same bits."""
    problem = cases.make("cuda", LENGTHS, 4, gate, initial=FP32, seed=30)
    out, state = cases.run(problem)
    assert state is not None
    given = cases.without_gate(problem, cases.log_decays(problem))
    cases.check_against_oracle(f"log-decays of the {cases.REGIME[gate]} gate", given, LIMIT[gate])
    for what, same in {
        "fp32 beta": problem.replace(beta=problem.beta.float()),
        "flat dt_bias": problem.replace(dt_bias=problem.dt_bias.flatten()),
        "repeated keys as groups": problem.replace(
            q=problem.q[:, :, ::2].repeat_interleave(2, 2), k=problem.k[:, :, ::2].repeat_interleave(2, 2)
        ),
    }.items():
        expected = (out, state)
        if what == "repeated keys as groups":
            expected = cases.run(same)
            same = problem.replace(q=problem.q[:, :, ::2], k=problem.k[:, :, ::2])
        again, again_state = cases.run(same)
        cases.check_same(again, expected[0], f"out, {what}")
        cases.check_same(again_state, expected[1], f"state, {what}")


def test_a_gate_may_take_any_finite_value() -> None:
    largest = torch.finfo(FP32).max
    for value in (largest, 1e4, 89.0, -89.0, -1e4, -largest):
        problem = cases.make("cuda", [40, 3], 2, initial=FP32, seed=31).replace(lower_bound=None)
        for dtype in (BF16, FP32):
            gate = problem.g.to(dtype)
            gate[..., ::3] = value if dtype is FP32 else torch.tensor(value).bfloat16().clamp(-3e38, 3e38).item()
            cases.run(problem.replace(g=gate))
            cases.run(cases.without_gate(problem, gate))
        for parameter in ("A_log", "dt_bias"):
            cases.run(problem.replace(**{parameter: torch.full_like(getattr(problem, parameter), value)}))


@pytest.mark.parametrize(("spare", "shift"), [(12, 0), (12, 1), (3, 0), (10, 2)])
def test_unaligned_slices_of_a_fused_projection(spare: int, shift: int) -> None:
    cases.check_fused_slices("cuda", 300, 3 if spare == 3 else 6, spare, shift)


def test_mixed_layouts() -> None:
    cases.check_mixed_layouts("cuda")


@pytest.mark.parametrize("form", ["unaligned", "fp32 g", "grouped", "K-first pool", "states on the way"])
def test_no_hidden_copy(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_SPLIT", "0")
    T, H, K = 4000, 12, cases.K
    problem = cases.make("cuda", None, H, batch=(1, T), initial=FP32, group=2 if form == "grouped" else 1)
    out = torch.empty(1, T, H, K, dtype=BF16, device="cuda")
    extras: dict[str, Any] = {}
    if form == "unaligned":
        problem, _ = cases.fused_slices("cuda", problem, H)
        assert problem.beta.stride(1) == 4 * H * K + H
    elif form == "fp32 g":
        problem.g = problem.g.float()
    elif form == "K-first pool":
        extras = {"state_v_first": False, "state_indices": torch.zeros(1, dtype=torch.int64, device="cuda")}
    elif form == "states on the way":
        extras = {
            "intermediate_states": torch.empty(-(-T // 64), H, K, K, dtype=BF16, device="cuda"),
            "checkpoint_states": torch.empty(1, H, K, K, device="cuda"),
            "checkpoint_offsets": torch.tensor([160], device="cuda"),
        }
    state = problem.initial_state
    cases.call(problem, out, state, **extras)  # loads the module
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        cases.call(problem, out, state, **extras)
    torch.cuda.synchronize()
    # A workspace for handing states on is not a copy: the smallest input here is 12 MB.
    assert torch.cuda.max_memory_allocated() - before <= 0 or (
        torch.cuda.max_memory_allocated() - before <= _workspace_of(T, H)
    )
    assert torch.cuda.mem_get_info()[0] == free


def _workspace_of(T: int, H: int) -> int:
    import flash_kda

    return flash_kda.get_workspace_size(T, H) + 512  # the allocator rounds up


@pytest.mark.parametrize("seed", range(20))
def test_random_forms(seed: int) -> None:
    """What the CPU tests draw with hypothesis, drawn here from a few seeds: any combination of forms, against fp64."""
    cases.check_against_oracle(f"random form {seed}", cases.random_form("cuda", seed), FORM_LIMIT)
