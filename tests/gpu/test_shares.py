"""Items shared out among blocks, some cut where a share ends: a sequence's bits do not depend on what else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
from kda_cases import FP32, STRONG, WEAK  # noqa: E402

# Lengths and heads such that shares are long enough to cut (132 blocks, a thousand tokens each), with sequences that are longer than a share, and a crowd.
BATCHES = {
    "even": ([1300, 5, 777, 0, 64], 96),
    "cut": ([700, 700, 650], 100),
    "one long": ([6000] + [40] * 30, 16),
    "half in one": ([5000] + [250] * 19, 24),
    "short": ([16] * 50, 8),
}


def part(problem: cases.Problem, n: int) -> cases.Problem:
    """Sequence n alone."""
    assert problem.cu_seqlens is not None
    assert problem.initial_state is not None
    first, last = problem.cu_seqlens[n : n + 2].tolist()
    rows = {name: getattr(problem, name)[:, first:last].contiguous() for name in ("q", "k", "v", "g", "beta")}
    return problem.replace(**rows, initial_state=problem.initial_state[n : n + 1].contiguous(), cu_seqlens=None)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("gate", [STRONG, WEAK], ids=cases.REGIME.get)
def test_a_sequence_is_the_same_alone(name: str, gate: float) -> None:
    lengths, H = BATCHES[name]
    problem = cases.make("cuda", lengths, H, gate, initial=FP32, seed=40)
    out, states = cases.run(problem, batch_invariant=True)
    assert states is not None
    assert problem.cu_seqlens is not None
    offsets = problem.cu_seqlens.tolist()
    for n in {0, 1, len(lengths) // 2, len(lengths) - 1}:
        alone, state = cases.run(part(problem, n), batch_invariant=True)
        cases.check_same(out[:, offsets[n] : offsets[n + 1]], alone, f"out of sequence {n}")
        assert state is not None
        cases.check_same(states[n : n + 1], state, f"state of sequence {n}")


def test_many_sequences() -> None:
    """4096 sequences, empty ones among them, in one call and in two."""
    lengths = [(7 * n) % 19 for n in range(4096)]
    problem = cases.make("cuda", lengths, 2, WEAK, initial=FP32, offsets=torch.int32, seed=41)
    out, states = cases.run(problem)
    assert states is not None
    assert problem.cu_seqlens is not None
    assert problem.initial_state is not None
    for first, last in ((0, 1500), (1500, 4096)):
        tokens = slice(*problem.cu_seqlens[[first, last]].tolist())
        half = problem.replace(
            **{name: getattr(problem, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")},
            initial_state=problem.initial_state[first:last].contiguous(),
            cu_seqlens=(problem.cu_seqlens[first : last + 1] - problem.cu_seqlens[first]).contiguous(),
        )
        its_out, its_states = cases.run(half)
        cases.check_same(out[:, tokens], its_out, "out")
        assert its_states is not None
        cases.check_same(states[first:last], its_states, "states")


def test_a_graph_hands_states_on_at_each_replay() -> None:
    """The flags between blocks are used up: a second replay, with other values, waits anew."""
    problem = cases.make("cuda", [700, 700, 650], 100, WEAK, initial=FP32, seed=42)
    out, state = torch.empty_like(problem.v), torch.empty_like(problem.initial_state)
    cases.call(problem, out, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.call(problem, out, state)
    for seed in (43, 44):
        problem.v.copy_(cases.make("cuda", [700, 700, 650], 100, WEAK, seed=seed).v)
        expected: list[Any] = [torch.empty_like(out), torch.empty_like(state)]
        cases.call(problem, *expected)
        graph.replay()
        torch.cuda.synchronize()
        cases.check_same(out, expected[0], "out")
        cases.check_same(state, expected[1], "state")
