"""The oracle: Kimi Delta Attention in plain torch, on any device.

Per head, with a state ``S`` of shape ``[V, K]``, for each token ``t``::

    a_t = exp(lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias)))    decay, one per channel, in (0, 1)
    S   = S * a_t                                                      columns scaled
    u_t = sigmoid(beta_t) * (v_t - S k_t)                              delta rule
    S   = S + u_t k_t^T
    o_t = scale * S q_t

``q`` and ``k`` are L2-normalised first: ``x * rsqrt(sum(x^2) + 1e-6)``.

``recurrent`` is this recurrence, token by token. ``chunked`` computes the same function 16 tokens at a time (the UT form):
with ``A_t`` the product of the decays from the start of the chunk through ``t``::

    M[t,s] = sum_c k_t[c] k_s[c] A_t[c]/A_s[c]    (s < t)        P[t,s] = scale * the same with q_t    (s <= t)
    T      = (I + diag(beta) M)^-1 diag(beta)                    U      = T (V - (k A) S^T)
    O      = scale (q A) S^T + P U                               S      = S * A_16 + U^T (k A_16/A)

Each ratio of decays is taken as one exponential of a difference that is never positive: a strong gate takes ``A`` down to
exp(-80) within a chunk, and a product with ``1/A`` would lose accuracy or overflow. ``T`` comes from a triangular
solve, not from a series, which near-equal keys would make diverge.

Both run in fp64 unless told otherwise, take any strides, any head dimensions and any float dtype, and record no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CHUNK", "chunked", "recurrent"]

CHUNK = 16
NORM_EPS = 1e-6

# Elements of one prepared [sequences, heads, tokens, K] tensor. A dozen of this size live at once.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Token-by-token recurrence: the definition that everything else is measured against.

    Args:
        q, k: ``[B, T, H, K]``, raw; normalised inside.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, raw gate.
        beta: ``[B, T, H]``, logits; the sigmoid is applied inside.
        scale: factor on the output.
        A_log: ``[H]``.
        dt_bias: ``[H, K]`` or ``[H * K]``.
        lower_bound: log-decay per token of a fully open gate, negative.
        initial_state: ``[N, H, V, K]``; zero if None. Not modified.
        cu_seqlens: ``[N + 1]`` offsets of N sequences laid end to end (needs ``B == 1``); None: N = B sequences of length T.
            Offsets are clamped into [0, T], and a sequence that ends before it begins is empty. Read on the host.
        dtype: of the arithmetic and of both results.

    Returns:
        ``out [B, T, H, V]``, zero in rows that belong to no sequence, and ``final_state [N, H, V, K]``.

    Raises:
        ValueError: if shapes do not agree.
    """
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    return out, _run(_recurrent_block, inputs, out, dtype)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The same function in chunks of 16 tokens: equal to ``recurrent`` up to rounding, and about ten times faster.

    Arguments, results and errors are those of ``recurrent``.
    """
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    return out, _run(_chunked_block, inputs, out, dtype)


def write_chunked(
    out: Tensor,
    final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """``chunked`` in fp32, written in place as the kernel does.

    Rows of ``out`` that belong to no sequence stay untouched. ``final_state`` may be ``initial_state``.
    """
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    # As the kernel, it writes into tensors made in inference mode too, and hands on no derivative of any kind.
    with torch.inference_mode():
        state = _run(_chunked_block, inputs, out, torch.float32)
        if final_state is not None:
            final_state.copy_(state)


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class _Block(NamedTuple):
    """Tokens of the sequences still running, gathered and activated; tokens past a sequence's end leave the state alone."""

    batch: Tensor  # [n, 1] int64
    token: Tensor  # [n, L] int64
    valid: Tensor  # [n, L] bool
    q: Tensor  # [n, H, L, K] normalised, times scale
    k: Tensor  # [n, H, L, K] normalised; zero where not valid
    v: Tensor  # [n, H, L, V]
    log_decay: Tensor  # [n, H, L, K]; zero where not valid
    beta: Tensor  # [n, H, L] in (0, 1); zero where not valid


def _run(block_fn: Callable[[_Block, Tensor], Tensor], x: _Inputs, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Write ``out`` in place, in its own dtype; return the final states."""
    _check_shapes(x)
    device = x.q.device
    sequences = _sequences(x)
    # Longest first: the sequences still running at any token are then a prefix.
    order = sorted(range(len(sequences)), key=lambda i: -sequences[i][2])
    rows = torch.tensor(order, dtype=torch.int64, device=device)
    with torch.no_grad(), _no_autocast(device):
        if x.initial_state is None:
            state = torch.zeros(len(order), x.q.shape[2], x.v.shape[3], x.q.shape[3], dtype=dtype, device=device)
        else:
            state = x.initial_state[rows].to(dtype)
        for block in _blocks(x, [sequences[i] for i in order], dtype):
            result = block_fn(block, state[: len(block.token)])  # updates these states in place
            batch = block.batch.expand_as(block.token)[block.valid]
            out[batch, block.token[block.valid]] = result.transpose(1, 2)[block.valid].to(out.dtype)
        final = torch.empty_like(state)
        final[rows] = state
    return final


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast of the caller would round the products of an fp32 run to bf16."""
    off: AbstractContextManager[object] = nullcontext()
    if device.type in ("cpu", "cuda"):
        off = torch.autocast(device.type, enabled=False)
    return off


def _check_shapes(x: _Inputs) -> None:
    if x.q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {list(x.q.shape)}")
    B, T, H, K = x.q.shape
    if x.v.dim() != 4 or x.v.shape[:3] != x.q.shape[:3]:
        raise ValueError(f"v must be [B, T, H, V] with [B, T, H] = {[B, T, H]} as in q, got {list(x.v.shape)}")
    V = x.v.shape[3]
    expected = {"k": [B, T, H, K], "g": [B, T, H, K], "beta": [B, T, H], "A_log": [H]}
    for name, shape in expected.items():
        got = list(getattr(x, name).shape)
        if got != shape:
            raise ValueError(f"{name} must be {shape} to fit q, got {got}")
    if list(x.dt_bias.shape) not in ([H, K], [H * K]):
        raise ValueError(f"dt_bias must be {[H, K]} or {[H * K]} to fit q, got {list(x.dt_bias.shape)}")
    N = B
    if x.cu_seqlens is not None:
        if B != 1 or x.cu_seqlens.dim() != 1 or x.cu_seqlens.numel() < 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B == 1, got {list(x.cu_seqlens.shape)} with B == {B}")
        N = x.cu_seqlens.numel() - 1
    if x.initial_state is not None and list(x.initial_state.shape) != [N, H, V, K]:
        raise ValueError(f"initial_state must be {[N, H, V, K]}, got {list(x.initial_state.shape)}")


def _sequences(x: _Inputs) -> list[tuple[int, int, int]]:
    """(batch, first token, length) of each sequence."""
    B, T = x.q.shape[:2]
    if x.cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    offsets = [min(max(int(offset), 0), T) for offset in x.cu_seqlens.tolist()]
    return [(0, begin, max(end - begin, 0)) for begin, end in zip(offsets[:-1], offsets[1:])]


def _blocks(x: _Inputs, sequences: list[tuple[int, int, int]], dtype: torch.dtype) -> Iterator[_Block]:
    """The tokens of ``sequences`` (longest first) in blocks of whole chunks."""
    device, heads, K = x.q.device, x.q.shape[2], x.q.shape[3]
    if heads == 0:
        return
    rate = torch.exp(x.A_log.to(dtype)).clamp(max=torch.finfo(dtype).max).view(1, heads, 1, 1)
    bias = x.dt_bias.to(dtype).view(1, heads, 1, K)
    limit = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cpu"])

    done = 0
    longest = sequences[0][2] if sequences else 0
    while done < longest:
        active = [s for s in sequences if s[2] > done]
        tokens = max(limit // (len(active) * heads * K) // CHUNK, 1) * CHUNK
        tokens = min(tokens, -(-(longest - done) // CHUNK) * CHUNK)
        batch, begin, length = (
            torch.tensor(column, dtype=torch.int64, device=device).unsqueeze(1) for column in zip(*active)
        )
        position = torch.arange(done, done + tokens, device=device).unsqueeze(0)
        valid = position < length
        token = torch.where(valid, begin + position, begin)

        # [n, L, H, ...] -> [n, H, L, ...]: an advanced index copies only what it names, whatever the strides.
        qb, kb, vb, gb, bb = (tensor[batch, token].to(dtype).transpose(1, 2) for tensor in (x.q, x.k, x.v, x.g, x.beta))
        padding = ~valid.unsqueeze(1)  # [n, 1, L]
        yield _Block(
            batch=batch,
            token=token,
            valid=valid,
            q=x.scale * _normalise(qb),
            k=_normalise(kb).masked_fill(padding.unsqueeze(-1), 0),
            v=vb,
            log_decay=(x.lower_bound * torch.sigmoid(rate * (gb + bias))).masked_fill(padding.unsqueeze(-1), 0),
            beta=torch.sigmoid(bb).masked_fill(padding, 0),
        )
        done += tokens


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _recurrent_block(block: _Block, state: Tensor) -> Tensor:
    decay = torch.exp(block.log_decay)
    out = torch.empty_like(block.v)
    for t in range(block.token.shape[1]):
        k_t = block.k[:, :, t]
        state *= decay[:, :, t, None, :]
        u_t = block.beta[:, :, t, None] * (block.v[:, :, t] - _times(state, k_t))
        state += u_t.unsqueeze(-1) * k_t.unsqueeze(-2)
        out[:, :, t] = _times(state, block.q[:, :, t])
    return out


def _times(state: Tensor, vector: Tensor) -> Tensor:
    return torch.matmul(state, vector.unsqueeze(-1)).squeeze(-1)


def _chunked_block(block: _Block, state: Tensor) -> Tensor:
    n, heads, tokens, K = block.k.shape
    V = block.v.shape[3]
    shape = (n, heads, tokens // CHUNK, CHUNK)
    q, k, log_decay = (x.reshape(*shape, K) for x in (block.q, block.k, block.log_decay))
    v, beta = block.v.reshape(*shape, V), block.beta.reshape(shape)

    total = log_decay.cumsum(-2)  # log A, [n, H, chunks, 16, K]
    inner = torch.zeros(*shape, CHUNK, dtype=q.dtype, device=q.device)  # M
    score = torch.zeros_like(inner)  # P
    for s in range(CHUNK):
        k_s = torch.exp(total[..., s:, :] - total[..., s : s + 1, :]) * k[..., s : s + 1, :]
        score[..., s:, s] = (q[..., s:, :] * k_s).sum(-1)
        inner[..., s + 1 :, s] = (k[..., s + 1 :, :] * k_s[..., 1:, :]).sum(-1)
    solve = torch.linalg.solve_triangular(  # T
        beta.unsqueeze(-1) * inner, torch.diag_embed(beta), upper=False, unitriangular=True
    )

    decay = torch.exp(total)
    k_in, q_in = k * decay, q * decay
    last = total[..., -1:, :]
    k_out, decay_out = k * torch.exp(last - total), torch.exp(last)

    out = torch.empty_like(v)
    for c in range(shape[2]):
        old = state.transpose(-1, -2)
        u = torch.matmul(solve[:, :, c], v[:, :, c] - torch.matmul(k_in[:, :, c], old))
        out[:, :, c] = torch.matmul(q_in[:, :, c], old) + torch.matmul(score[:, :, c], u)
        state *= decay_out[:, :, c]
        state += torch.matmul(u.transpose(-1, -2), k_out[:, :, c])
    return out.reshape(n, heads, tokens, V)
