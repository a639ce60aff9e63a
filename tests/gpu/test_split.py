"""Long sequences cut into segments: the same results but for rounding, whatever the decay, at less time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
import record  # noqa: E402
from kda_cases import BF16, FP32, LIMIT, REGIME, STRONG, WEAK, WEAKEST  # noqa: E402

from flash_kda import device_code  # noqa: E402

GATES = pytest.mark.parametrize("gate", [STRONG, WEAK, WEAKEST], ids=REGIME.get)
# One sequence or the rows of a batch; lengths that are multiples of nothing, and a last segment of few tokens.
SHAPES = {
    "T=8192 H=16": {"batch": (1, 8192), "H": 16},
    "T=6001 H=8": {"batch": (1, 6001), "H": 8},
    "B=2 T=4100 H=4": {"batch": (2, 4100), "H": 4},
    "T=1024 H=1": {"batch": (1, 1024), "H": 1},
    "T=20001 H=1": {"batch": (1, 20001), "H": 1},
}


def make(name: str, gate: float, **changes: Any) -> cases.Problem:
    shape = dict(SHAPES[name])
    return cases.make("cuda", None, shape.pop("H"), gate, **shape, **changes)


def is_split(problem: cases.Problem) -> bool:
    B, T, H, _ = problem.q.shape
    return device_code.native().segments(0, T, H, B, False, False) > 1


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of ``fwd`` that are not split."""

    def call(problem: cases.Problem, final: torch.dtype | None = FP32) -> tuple[torch.Tensor, torch.Tensor | None]:
        with monkeypatch.context() as patch:
            patch.setenv("FLASH_KDA_SPLIT", "0")
            assert not is_split(problem)
            return cases.run(problem, final)

    return call


@GATES
@pytest.mark.parametrize("name", SHAPES)
def test_split_is_as_accurate_as_whole(name: str, gate: float, whole: Any) -> None:
    problem = make(name, gate, initial=FP32)
    assert is_split(problem)
    expected_out, expected_state = cases.oracle(problem)
    out, state = cases.run(problem)
    whole_out, whole_state = whole(problem)
    assert state is not None
    assert not torch.equal(out, whole_out) or gate == STRONG, "the two ways give the same bits: was anything split?"
    errors = {"out": cases.distance(out, expected_out), "state": cases.distance(state, expected_state)}
    record.error(f"split {REGIME[gate]} {name}", **errors)
    # Splitting adds no error to speak of.
    assert errors["out"] <= 1.05 * cases.distance(whole_out, expected_out)
    assert errors["state"] <= 1.05 * cases.distance(whole_state, expected_state)
    assert max(errors.values()) <= LIMIT[gate]


@pytest.mark.parametrize("initial", [None, BF16, FP32], ids=str)
@pytest.mark.parametrize("final", [None, BF16, FP32], ids=str)
def test_state_dtypes(initial: torch.dtype | None, final: torch.dtype | None) -> None:
    problem = make("T=6001 H=8", WEAK, initial=initial, seed=3)
    assert is_split(problem)
    cases.check_against_oracle(f"split initial {initial} final {final}", problem, LIMIT[WEAK], final)


def test_state_in_place() -> None:
    problem = make("T=6001 H=8", WEAKEST, initial=FP32, seed=4)
    expected_out, expected_state = cases.run(problem)
    assert problem.initial_state is not None
    for _ in range(10):
        again = problem.replace(initial_state=problem.initial_state.clone())
        out, state = cases.call(again, None, again.initial_state)
        cases.check_same(out, expected_out, "out with the state in place")
        cases.check_same(state, expected_state, "state in place")


@pytest.mark.parametrize("offsets", [[0, 6001], [0, 5000], [1000, 6001], [0, 700], [5, 5], [0, 0]], ids=str)
def test_one_sequence_by_offsets(offsets: list[int]) -> None:
    """The host plans for all T tokens; how long the sequence is, only the device knows."""
    problem = make("T=6001 H=8", WEAK, initial=FP32, seed=5)
    problem.cu_seqlens = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    cases.check_against_oracle(f"split offsets {offsets}", problem, LIMIT[WEAK])


def test_equal_keys() -> None:
    cases.check_against_oracle("split equal keys T=16384", cases.equal_keys("cuda", 16384, 2), cases.EQUAL_KEYS_LIMIT)


def test_repeated_runs_and_graphs_give_the_same_bits() -> None:
    problem = make("T=8192 H=16", WEAK, initial=FP32)
    out, state = cases.run(problem)
    assert state is not None
    for _ in range(5):
        again_out, again_state = cases.run(problem)
        cases.check_same(again_out, out, "out of a repeated run")
        cases.check_same(again_state, state, "state of a repeated run")
    graph_out, graph_state = torch.empty_like(out), torch.empty_like(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.call(problem, graph_out, graph_state)
    graph.replay()
    torch.cuda.synchronize()
    cases.check_same(graph_out, out, "out of a graph")
    cases.check_same(graph_state, state, "state of a graph")


# (tokens, heads)
@pytest.mark.parametrize(("T", "H"), [(2048, 12), (4096, 8), (8192, 16), (8192, 32), (65536, 8), (65536, 4)], ids=str)
def test_split_takes_less_time(T: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cuda", None, H, WEAK, batch=(1, T), initial=FP32)
    times = cases.microseconds_by_split(problem, monkeypatch)
    record.time(f"split T={T} H={H}", times["auto"])
    record.time(f"whole T={T} H={H}", times["0"])
    assert times["auto"] <= 1.05 * times["0"], times
