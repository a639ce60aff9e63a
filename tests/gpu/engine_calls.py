"""The calls of serving engines, in the form in which each makes them, against the fp64 recurrence; for any device.

What sglang and vLLM pass is taken from their public KDA layers: sglang ``linear/kernels/kda_flashkda.py`` and the form with
``state_indices`` that other builds use, vLLM ``models/kimi_k3/nvidia/kda.py``.
"""

from __future__ import annotations

from typing import Any

import kda_cases as cases
import torch
from kda_cases import FP32, WEAK, K
from torch import Tensor

import flash_kda

LENGTHS = [70, 1, 0, 200]
SLOTS = [5, 2, 7, 0]  # rows of the pool, one a sequence
LIMIT = cases.LIMIT[WEAK]


class Batch:
    """A ragged batch as an engine holds it: int32 offsets, a pool of states, parameters in the shapes of the checkpoint."""

    def __init__(self, device: str, pool_dtype: torch.dtype = FP32, heads: int = 12) -> None:
        self.problem = cases.make(device, LENGTHS, heads, WEAK, offsets=torch.int32)
        self.heads, self.device = heads, device
        self.pool = torch.randn(9, heads, K, K, device=device).to(pool_dtype)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
        assert self.problem.A_log is not None
        assert self.problem.dt_bias is not None
        self.A_log = self.problem.A_log.view(1, 1, heads, 1)
        self.dt_bias = self.problem.dt_bias.view(-1)

    def expected(self) -> tuple[Tensor, Tensor]:
        return cases.oracle(self.problem.replace(initial_state=self.pool[self.slots.long()]))

    def expected_prefix(self, sequence: int, tokens: int) -> Tensor:
        """fp64 state of one sequence after its first ``tokens`` tokens."""
        begin = sum(LENGTHS[:sequence])
        part = self.problem.part(begin, begin + tokens)
        return cases.oracle(part.replace(initial_state=self.pool[SLOTS[sequence]].unsqueeze(0)))[1][0]

    def expected_starts(self) -> Tensor:
        """fp64 states before tokens 0, 64, 128, ... of each sequence in turn."""
        return torch.stack(
            [self.expected_prefix(i, tokens) for i, length in enumerate(LENGTHS) for tokens in range(0, length, 64)]
        )


def check_pool(before: Tensor, after: Tensor, expected: Tensor) -> None:
    """The rows of the batch hold the final states; every other row is as it was."""
    others = [row for row in range(before.shape[0]) if row not in SLOTS]
    assert cases.distance(after[SLOTS], expected) <= LIMIT
    cases.check_same(after[others], before[others], "rows of the pool that belong to no sequence")


def check_sglang(device: str, beta_is_raw: bool = True) -> None:
    """Ten arguments by position, three by name; states gathered from the pool and scattered into it; offsets cast to int64."""
    batch = Batch(device)
    p = batch.problem
    expected_out, expected_state = batch.expected()
    before = batch.pool.clone()
    beta = p.beta
    if not beta_is_raw:
        beta = torch.logit(torch.sigmoid(p.beta.float()).clamp_(1e-7, 1 - 1e-7)).bfloat16()
    initial_state = batch.pool[batch.slots].contiguous()
    out, final_state = torch.empty_like(p.v), torch.empty_like(initial_state)
    flash_kda.fwd(
        p.q, p.k, p.v, p.g, beta, K**-0.5, out, batch.A_log.reshape(-1).float().contiguous(),
        batch.dt_bias.reshape(batch.heads, -1).float().contiguous(), -5.0,
        initial_state=initial_state, final_state=final_state, cu_seqlens=p.cu_seqlens.to(torch.int64),
    )  # fmt: skip
    batch.pool[batch.slots] = final_state
    assert cases.distance(out, expected_out) <= LIMIT
    check_pool(before, batch.pool, expected_state)


def check_sglang_pool(device: str, pool_dtype: torch.dtype = FP32) -> None:
    """The pool itself as both states, rows by index, states at every 64 tokens, and a copy of the offsets on the host."""
    batch = Batch(device, pool_dtype)
    p = batch.problem
    expected_out, expected_state = batch.expected()
    starts = batch.expected_starts()
    before = batch.pool.clone()
    chunks = sum(-(-length // 64) for length in LENGTHS)
    intermediate = torch.empty(chunks, batch.heads, K, K, dtype=pool_dtype, device=device)
    out = torch.empty_like(p.q)
    flash_kda.fwd(
        p.q, p.k, p.v, p.g, p.beta, K**-0.5, out, A_log=batch.A_log.reshape(batch.heads),
        dt_bias=batch.dt_bias.reshape(batch.heads, K), lower_bound=-5.0, initial_state=batch.pool, final_state=batch.pool,
        cu_seqlens=p.cu_seqlens.to(torch.int64), cu_seqlens_cpu=torch.tensor([0, *LENGTHS]).cumsum(0),
        intermediate_states=intermediate, state_indices=batch.slots, enable_cp=True,
    )  # fmt: skip
    assert cases.distance(out, expected_out) <= LIMIT
    check_pool(before, batch.pool, expected_state)
    assert intermediate.unsqueeze(0).shape == (1, chunks, batch.heads, K, K)
    assert cases.distance(intermediate, starts) <= LIMIT


def check_vllm(device: str, operator: Any, checkpoints: int, more: tuple[Any, ...] = ()) -> None:
    """Sixteen arguments by position: int32 offsets, beta as columns of a wide projection, a workspace larger than needed, and
    states at one or two offsets a sequence, 0 for none."""
    batch = Batch(device)
    p = batch.problem
    expected_out, expected_state = batch.expected()
    width = 4 * batch.heads * K + K + batch.heads + 4  # as vLLM's in_proj_qkvgfab for 12 heads
    projected = torch.zeros(1, sum(LENGTHS), width, dtype=torch.bfloat16, device=device)
    beta = projected[..., -4 - batch.heads : -4].copy_(p.beta)
    assert beta.stride(1) == width
    initial_state = batch.pool[batch.slots].contiguous()
    out, final_state = torch.empty_like(p.v), torch.empty_like(initial_state)
    size = torch.ops.flash_kda.get_workspace_size(p.q.shape[1], batch.heads, len(LENGTHS))
    workspace = torch.empty(size + 4096, dtype=torch.uint8, device=device)
    offsets = [[64, 16], [0, 0], [0, 16], [192, 0]]
    shape: tuple[int, ...] = (len(LENGTHS), 2, batch.heads, K, K)
    if checkpoints == 1:
        offsets, shape = [pair[:1] for pair in offsets], (len(LENGTHS), batch.heads, K, K)
    states = torch.full(shape, 7.0, device=device)
    at = torch.tensor(offsets, dtype=torch.int32, device=device)
    operator(
        p.q, p.k, p.v, p.g, beta, K**-0.5, out, workspace, batch.A_log.reshape(-1), batch.dt_bias.view(-1, K), -5.0,
        initial_state, final_state, p.cu_seqlens, states, at if checkpoints == 2 else at.squeeze(1), *more,
    )  # fmt: skip
    assert cases.distance(out, expected_out) <= LIMIT
    assert cases.distance(final_state, expected_state) <= LIMIT
    states = states.view(len(LENGTHS), checkpoints, batch.heads, K, K)
    for sequence, tokens_of in enumerate(offsets):
        for i, tokens in enumerate(tokens_of):
            if 0 < tokens <= LENGTHS[sequence]:
                right = batch.expected_prefix(sequence, tokens)
                assert cases.distance(states[sequence, i], right) <= LIMIT
            else:
                assert bool((states[sequence, i] == 7.0).all()), "a row without a checkpoint was written"


def check_vllm_without_checkpoints(device: str, operator: Any) -> None:
    """As vLLM calls without prefix caching: fourteen arguments, a workspace of just the size that was asked for."""
    batch = Batch(device)
    p = batch.problem
    expected_out, expected_state = batch.expected()
    initial_state = batch.pool[batch.slots].contiguous()
    out, final_state = torch.empty_like(p.v), torch.empty_like(initial_state)
    size = torch.ops.flash_kda.get_workspace_size(p.q.shape[1], batch.heads, len(LENGTHS))
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    operator(
        p.q, p.k, p.v, p.g, p.beta, K**-0.5, out, workspace, p.A_log, p.dt_bias, -5.0, initial_state, final_state, p.cu_seqlens,
    )  # fmt: skip
    assert cases.distance(out, expected_out) <= LIMIT
    assert cases.distance(final_state, expected_state) <= LIMIT


def check_compiled(device: str, **options: Any) -> None:
    """A compiled program with a call in its midst gives the bits of the eager one, results written in place included."""
    p = cases.make(device, [100, 0, 37], 4, WEAK, initial=FP32, group=2)

    def program(q: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        out, _ = flash_kda.fwd(
            q * 1, p.k, p.v, p.g, beta, 0.1, None, p.A_log, p.dt_bias, -5.0, state, state, p.cu_seqlens
        )
        return out + 1

    assert p.initial_state is not None
    torch._dynamo.reset()
    with torch.inference_mode():
        expected_state = p.initial_state.clone()
        expected = program(p.q, p.beta, expected_state)
        compiled = torch.compile(program, fullgraph=True, **options)
        for _ in range(3):  # modes with CUDA graphs run, record and replay
            state = p.initial_state.clone()
            out = compiled(p.q, p.beta, state).clone()
            cases.check_same(out, expected, "out")
            cases.check_same(state, expected_state, "state")
