"""States in every form, and states saved on the way. The bodies run on the CPU path too (tests/cpu)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
from kda_cases import FP32, WEAK  # noqa: E402


def test_key_first_states() -> None:
    cases.check_key_first_states("cuda")


def test_pools() -> None:
    cases.check_pools("cuda")


def test_saved_states() -> None:
    cases.check_all_saved_states("cuda")


def test_saved_states_of_many_sequences() -> None:
    """More items than multiprocessors, of all lengths: whole items, parts of items, several a block."""
    lengths = [(7 * n * n + 3 * n) % 331 if n % 4 else 16 * (n % 7) for n in range(40)]
    problem = cases.make("cuda", lengths, 6, WEAK, initial=FP32, offsets=torch.int32, seed=13)
    cases.check_saved_states("cuda", problem, lengths, every=7)


def test_saved_states_of_long_sequences() -> None:
    lengths = [2000, 1, 4099, 600]
    problem = cases.make("cuda", lengths, 64, WEAK, initial=FP32, seed=14)
    cases.check_saved_states("cuda", problem, lengths, every=1000)


def test_workspace() -> None:
    cases.check_workspace("cuda")


def test_batch_invariance() -> None:
    """A sequence's bits, alone and among others."""
    lengths = [900, 64, 3000, 17]
    problem = cases.make("cuda", lengths, 4, WEAK, initial=FP32, seed=15)
    out, state = cases.run(problem, batch_invariant=True)
    assert state is not None
    begin = 0
    for n, length in enumerate(lengths):
        alone = problem.part(begin, begin + length).replace(initial_state=problem.initial_state[n : n + 1])
        its_out, its_state = cases.run(alone, batch_invariant=True)
        assert its_state is not None
        cases.check_same(its_out, out[:, begin : begin + length].contiguous(), f"out of sequence {n}")
        cases.check_same(its_state[0], state[n], f"state of sequence {n}")
        begin += length


def test_a_pool_in_a_graph_follows_the_indices() -> None:
    """Slots lie on the GPU: a replay uses what they hold then."""
    problem = cases.make("cuda", [40, 64, 5], 2, WEAK, seed=16)
    pool = torch.randn(6, 2, cases.K, cases.K, device="cuda")
    indices = torch.tensor([0, -1, 1], device="cuda", dtype=torch.int32)
    out = torch.empty_like(problem.v)
    work = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.call(problem.replace(initial_state=work), out, work, state_indices=indices)
    work.copy_(pool)
    indices.copy_(torch.tensor([5, 2, -1]))
    graph.replay()
    torch.cuda.synchronize()
    initial = torch.zeros(3, 2, cases.K, cases.K, device="cuda")
    initial[:2] = pool[[5, 2]]
    expected_out, expected_state = cases.run(problem.replace(initial_state=initial))
    assert expected_state is not None
    cases.check_same(out, expected_out, "out of a replayed graph")
    cases.check_same(work[[5, 2]], expected_state[:2], "rows of the pool")
    cases.check_same(work[[0, 1, 3, 4]], pool[[0, 1, 3, 4]], "other rows of the pool")
