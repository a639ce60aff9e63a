"""Cuts before which a state is forgotten: what comes after does not wait, and nothing but the time shows it; where it is not forgotten, nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
import record  # noqa: E402
from kda_cases import BF16, FP32, LIMIT, STRONG, WEAK  # noqa: E402

# One sequence, or rows of a batch, of few heads are cut into segments, the others where a share ends.
SHAPES: dict[str, dict[str, Any]] = {
    "T=8192 H=16": {"batch": (1, 8192), "H": 16},
    "T=1100 H=1": {"batch": (1, 1100), "H": 1},
    "B=2 T=4100 H=4": {"batch": (2, 4100), "H": 4},
    "T=5003 H=64": {"batch": (1, 5003), "H": 64},
    "T=6000 H=96": {"batch": (1, 6000), "H": 96},
    "one of 6000 among short": {"lengths": [40, 6000] + [25] * 30, "H": 16},
    "four lengths": {"lengths": [2500, 0, 4000, 3111], "H": 8},
}


def make(name: str, gate: float, **changes: Any) -> cases.Problem:
    shape = dict(SHAPES[name])
    return cases.make("cuda", shape.pop("lengths", None), shape.pop("H"), gate, **shape, **{"initial": FP32, **changes})


def poisoned_workspace(problem: cases.Problem) -> torch.Tensor:
    """One whose flags all say yes, and whose states are NaN."""
    return cases.workspace_of(problem).fill_(0xFF)


@pytest.mark.parametrize("name", SHAPES)
def test_forgotten_states_change_no_bit(name: str) -> None:
    """In the strong regime P is below 2^-64, so that what is left out would have changed nothing."""
    problem = make(name, STRONG, seed=50)
    expected = cases.run(problem, batch_invariant=True)
    for _ in range(3):
        got = cases.run(problem, workspace=poisoned_workspace(problem))
        for result, right, what in zip(got, expected, ("out", "state")):
            assert result is not None
            cases.check_same(result, right, what)
    cases.check_against_oracle(f"forgotten {name}", problem, LIMIT[STRONG])


@pytest.mark.parametrize("name", SHAPES)
def test_heads_that_forget_beside_heads_that_do_not(name: str) -> None:
    problem = make(name, STRONG, seed=51)
    problem.g[:, :, ::3] -= 7
    cases.run(problem, workspace=poisoned_workspace(problem))
    cases.check_against_oracle(f"forgotten in two heads of three {name}", problem, LIMIT[WEAK])


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_forget_beside_tokens_that_do_not(name: str) -> None:
    """Some cuts of a sequence are free, others are not."""
    problem = make(name, STRONG, seed=52)
    T = problem.g.shape[1]
    problem.g[:, T // 3 : T // 2] -= 9
    cases.run(problem, workspace=poisoned_workspace(problem))
    cases.check_against_oracle(f"forgotten but for a sixth {name}", problem, LIMIT[WEAK])


def wandering(problem: cases.Problem) -> cases.Problem:
    """Every channel decays to nothing within 48 tokens, yet the state lives on: it is where the gate is shut, for 16 tokens in channel 0, then,
    moved there by a key that is the difference of both, in channel 1, and so on. Half of it survives a move."""
    T = problem.q.shape[1]
    token = torch.arange(T, device=problem.q.device)
    problem.g.fill_(30.0)
    problem.k[..., :2] = 0
    problem.beta.fill_(-30.0)  # no update but by the moves, so that the state matters
    for channel in (0, 1):
        at = token // 16 % 2 == channel
        problem.g[:, at, :, channel] = -30.0
    move = token % 16 == 15
    problem.k[:, move] = 0
    problem.k[:, move, :, 0] = 1
    problem.k[:, move, :, 1] = -1
    problem.beta[:, move] = 30.0
    problem.g[:, move, :, :2] = -30.0  # both are there while it moves
    problem.v[:, move] *= 1e-3
    return problem


def test_channels_that_decay_are_no_proof() -> None:
    """What the survey of decays takes for forgotten, and the window's P shows to be alive."""
    for H, T in ((8, 2048), (64, 5003), (96, 6000)):
        problem = wandering(cases.make("cuda", None, H, batch=(1, T), initial=FP32, seed=53))
        one = problem.heads([0]).part(T - 48, T)
        decays = cases.log_decays(one).sum(1)
        assert decays.max().item() < -80 * 0.6932, "the survey would not be deceived"
        identity = torch.eye(cases.K, device="cuda")[None, None]
        still = one.replace(v=torch.zeros_like(one.v), initial_state=identity)
        assert cases.oracle(still)[1].abs().max().item() > 1e-3, "the state is forgotten"
        cases.check_against_oracle(f"wandering state T={T} H={H}", problem, 1e-2)


def test_forms_that_forget() -> None:
    """Windows in the kernels for every form: gates without a bound, given decays, fp32 g, strides, pools, grouped heads, keys first."""
    base = cases.make("cuda", None, 8, STRONG, batch=(1, 3000), initial=FP32, seed=54, group=2)
    expected = cases.oracle(base)
    given = cases.without_gate(base, cases.log_decays(base))
    for name, problem in {
        "log-decay": given,
        "log-decay, bf16 states": given.replace(initial_state=base.initial_state.bfloat16()),
        "fp32 g": base.replace(g=base.g.float()),
        "no bound": base.replace(lower_bound=None),
    }.items():
        cases.check_against_oracle(f"forgotten, {name}", problem, cases.FORM_LIMIT)
    pool = torch.full((3, 8, cases.K, cases.K), torch.nan, device="cuda")
    pool[1] = base.initial_state[0].mT
    slots = torch.tensor([1], device="cuda", dtype=torch.int32)
    out = torch.empty_like(base.v)
    problem = base.replace(initial_state=pool)
    cases.call(problem, out, pool, state_indices=slots, state_v_first=False)
    assert cases.distance(out, expected[0]) <= LIMIT[STRONG]
    assert cases.distance(pool[1].mT, expected[1][0]) <= LIMIT[STRONG]
    assert bool(pool[[0, 2]].isnan().all()), "another row of the pool was written"


@pytest.mark.parametrize("final", [None, BF16, FP32], ids=str)
def test_in_place_and_in_graphs(final: torch.dtype | None) -> None:
    for name in ("T=8192 H=16", "T=5003 H=64", "T=6000 H=96"):
        problem = make(name, STRONG, seed=55, initial=final)
        expected_out, expected_state = cases.run(problem, final)
        out = torch.empty_like(problem.v)
        first = None if final is None else problem.initial_state.clone()
        state = problem.initial_state  # the very tensor
        cases.call(problem, out, state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cases.call(problem, out, state)
        for _ in range(2):
            if first is not None:
                state.copy_(first)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            cases.check_same(out, expected_out, f"out of a graph, {name}")
            if first is not None:
                cases.check_same(state, expected_state, f"state of a graph, {name}")


@pytest.mark.parametrize("name", ["T=8192 H=16", "T=5003 H=64", "T=6000 H=96"])
def test_a_graph_replayed_with_other_gates(name: str) -> None:
    """What a replay hands on and does not need is gone before the next one, which does."""
    problems = [make(name, gate, seed=56) for gate in (STRONG, WEAK, STRONG, WEAK)]
    problem = make(name, STRONG, seed=57)
    out, state, workspace = (
        torch.empty_like(problem.v),
        torch.empty_like(problem.initial_state),
        poisoned_workspace(problem),
    )
    cases.call(problem, out, state, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.call(problem, out, state, workspace=workspace)
    for other in problems:
        for field in (*cases.ROWS, "A_log", "dt_bias", "initial_state"):
            getattr(problem, field).copy_(getattr(other, field))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected_out, expected_state = cases.run(other, workspace=poisoned_workspace(other))
        cases.check_same(out, expected_out, "out of a replay")
        cases.check_same(state, expected_state, "state of a replay")


@pytest.mark.parametrize("name", ["T=6000 H=96", "one of 6000 among short"])
def test_states_that_are_waited_for_change_no_bit(name: str) -> None:
    problem = make(name, WEAK, seed=58)
    expected = cases.run(problem, batch_invariant=True)
    for _ in range(10):
        for result, right in zip(cases.run(problem, workspace=poisoned_workspace(problem)), expected):
            assert result is not None
            cases.check_same(result, right, "result of a chain of blocks")


# (tokens, heads) and how many times as long the call takes that may not forget, at least; the H200 gives 3.4, 5, 2.9, 1.6, 1.25.
@pytest.mark.parametrize(
    ("T", "H", "factor"), [(2048, 12, 2.2), (8192, 16, 3.5), (8192, 32, 2.2), (8192, 64, 1.4), (8192, 96, 1.1)], ids=str
)
def test_forgetting_takes_less_time(T: int, H: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cuda", None, H, STRONG, batch=(1, T), initial=FP32)
    times = cases.microseconds_by_split(problem, monkeypatch)
    record.time(f"forgotten T={T} H={H}", times["auto"])
    assert times["auto"] * factor <= times["0"], times


# (tokens, heads): where nothing is forgotten, cuts cost next to nothing, even if windows are gone through in vain.
@pytest.mark.parametrize("seems_forgotten", [False, True], ids=["weak", "wandering"])
@pytest.mark.parametrize(("T", "H"), [(1024, 8), (8192, 64), (8192, 96)], ids=str)
def test_cuts_in_vain_cost_little(T: int, H: int, seems_forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cuda", None, H, WEAK, batch=(1, T), initial=FP32)
    if seems_forgotten:
        problem = wandering(problem)
    times = cases.microseconds_by_split(problem, monkeypatch)
    record.time(f"{'wandering' if seems_forgotten else 'not forgotten'} T={T} H={H}", times["auto"])
    assert times["auto"] <= 1.05 * times["0"], times
