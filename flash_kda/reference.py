"""The oracle: Kimi Delta Attention in plain torch, on any device.

Per head, with a state ``S`` of shape ``[V, K]``, for each token ``t``::

    a_t = exp(lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias)))    decay, one per channel, in (0, 1)
    S   = S * a_t                                                      columns scaled
    u_t = sigmoid(beta_t) * (v_t - S k_t)                              delta rule
    S   = S + u_t k_t^T
    o_t = scale * S q_t

``q`` and ``k`` are L2-normalised first: ``x * rsqrt(sum(x^2) + 1e-6)``. Options change single lines of this: without a lower
bound the gate is ``a_t = exp(-exp(A_log) * softplus(g_t + dt_bias))``, without a gate ``a_t = exp(min(g_t, 0))``; ``q`` and ``k`` can
be taken as they are, and so can ``beta``, which can also be doubled (then ``I - beta k k^T`` has negative eigenvalues). With more
value heads than query heads, consecutive ones share a query and a key.

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

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CHUNK", "SNAPSHOT_TOKENS", "chunked", "recurrent"]

CHUNK = 16
SNAPSHOT_TOKENS = 64  # between two intermediate states
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
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Token-by-token recurrence: the definition that everything else is measured against.

    Args:
        q, k: ``[B, T, H, K]``, raw; normalised inside.
        v: ``[B, T, HV, V]``, where HV is a multiple of H: value head ``h`` uses query and key head ``h // (HV // H)``.
        g: ``[B, T, HV, K]``, raw gate.
        beta: ``[B, T, HV]``, logits; the sigmoid is applied inside.
        scale: factor on the output.
        A_log: ``[HV]``; None: the factor ``exp(A_log)`` is 1.
        dt_bias: ``[HV, K]`` or ``[HV * K]``; None: zero.
        lower_bound: log-decay per token of a fully open gate, negative; None: the unbounded (softplus) gate.
        initial_state: ``[N, HV, V, K]``; zero if None. Not modified.
        cu_seqlens: ``[N + 1]`` offsets of N sequences laid end to end (needs ``B == 1``); None: N = B sequences of length T.
            Offsets are clamped into [0, T], and a sequence that ends before it begins is empty. Read on the host.
        use_qk_l2norm_in_kernel: False: q and k are taken as they are.
        use_gate_in_kernel: False: g is the natural-log decay (positive values count as 0); A_log, dt_bias and lower_bound are None.
        use_beta_sigmoid_in_kernel: False: beta is taken as it is.
        allow_neg_eigval: True: beta, activated or taken, is doubled.
        dtype: of the arithmetic and of both results.

    Returns:
        ``out [B, T, HV, V]``, zero in rows that belong to no sequence, and ``final_state [N, HV, V, K]``.

    Raises:
        ValueError: if shapes do not agree, or without a gate there are its parameters.
    """
    options = Options(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, options)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    return out, _run(_recurrent_block, inputs, out, dtype)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The same function in chunks of 16 tokens: equal to ``recurrent`` up to rounding, and about ten times faster.

    Arguments, results and errors are those of ``recurrent``.
    """
    options = Options(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, options)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    return out, _run(_chunked_block, inputs, out, dtype)


class Options(NamedTuple):
    """What ``fwd`` calls by the same names."""

    use_qk_l2norm_in_kernel: bool = True
    use_gate_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False


class States(NamedTuple):
    """The states of one call as ``fwd`` takes them, read and written."""

    initial: Tensor | None
    final: Tensor | None
    v_first: bool = True  # else [..., K, V]
    indices: Tensor | None = None  # row of initial and final for each sequence
    intermediate: Tensor | None = None
    checkpoint: Tensor | None = None
    checkpoint_offsets: Tensor | None = None


def write_chunked(
    out: Tensor,
    states: States,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> None:
    """``chunked`` in fp32, written in place as the kernel does.

    Rows of ``out`` that belong to no sequence stay untouched. ``states.final`` may be ``states.initial``.
    """
    inputs = _Inputs(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, None, cu_seqlens, options)
    # As the kernel, it writes into tensors made in inference mode too, and hands on no derivative of any kind.
    with torch.inference_mode():
        inputs = inputs._replace(initial_state=_gather(states))
        final = _run(_chunked_block, inputs, out, torch.float32, _Saver(states, inputs))
        _scatter(states, final)


def _oriented(tensor: Tensor, v_first: bool) -> Tensor:
    return tensor if v_first else tensor.transpose(-1, -2)


def _rows(pool: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences that have a row of the pool, and these rows."""
    row = indices.long()
    sequences = ((row >= 0) & (row < pool.shape[0])).nonzero().squeeze(1)
    return sequences, row[sequences]


def _gather(states: States) -> Tensor | None:
    """The initial states ``[N, HV, V, K]``."""
    if states.initial is None:
        return None
    pool = _oriented(states.initial, states.v_first)
    if states.indices is None:
        return pool
    sequences, rows = _rows(pool, states.indices)
    gathered = torch.zeros(len(states.indices), *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    gathered[sequences] = pool[rows]
    return gathered


def _scatter(states: States, final: Tensor) -> None:
    if states.final is None:
        return
    pool = _oriented(states.final, states.v_first)
    if states.indices is None:
        pool.copy_(final)
    else:
        sequences, rows = _rows(pool, states.indices)
        pool[rows] = final[sequences].to(pool.dtype)


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    options: Options


class _Saver:
    """Writes the states on the way: before each 64th token, and where a checkpoint is wanted."""

    def __init__(self, states: States, x: _Inputs) -> None:
        lengths = [length for _, _, length in _sequences(x)]
        self.intermediate = self.checkpoint = None
        self.step = 0  # tokens between two visits; 0: none
        if states.intermediate is not None:
            self.step = SNAPSHOT_TOKENS
            self.intermediate = _oriented(states.intermediate, states.v_first)
            counts = [-(-length // SNAPSHOT_TOKENS) for length in lengths]
            self.first = [sum(counts[:n]) for n in range(len(counts))]
        if states.checkpoint is not None and states.checkpoint_offsets is not None:
            self.step = CHUNK
            self.checkpoint = _oriented(states.checkpoint, states.v_first)
            offsets = states.checkpoint_offsets
            if offsets.dim() == 1:
                self.checkpoint, offsets = self.checkpoint.unsqueeze(1), offsets.unsqueeze(1)
            self.offsets = offsets.tolist()
        self.lengths = lengths

    def visit(self, order: list[int], done: int, state: Tensor) -> None:
        """After ``done`` tokens of each of the sequences of ``order``, whose states are the rows of ``state``."""
        for i, n in enumerate(order):
            if self.intermediate is not None and done % SNAPSHOT_TOKENS == 0 and done < self.lengths[n]:
                row = self.first[n] + done // SNAPSHOT_TOKENS
                if row < self.intermediate.shape[0]:
                    self.intermediate[row] = state[i].to(self.intermediate.dtype)
            if self.checkpoint is not None and 0 < done <= self.lengths[n]:
                for j, offset in enumerate(self.offsets[n]):
                    if offset == done:
                        self.checkpoint[n, j] = state[i].to(self.checkpoint.dtype)


class _Block(NamedTuple):
    """Tokens of the sequences still running, gathered and activated; tokens past a sequence's end leave the state alone."""

    batch: Tensor  # [n, 1] int64
    token: Tensor  # [n, L] int64
    valid: Tensor  # [n, L] bool
    q: Tensor  # [n, HV, L, K] normalised, times scale
    k: Tensor  # [n, HV, L, K] normalised; zero where not valid
    v: Tensor  # [n, HV, L, V]
    log_decay: Tensor  # [n, HV, L, K]; zero where not valid
    beta: Tensor  # [n, HV, L] activated; zero where not valid


def _run(
    block_fn: Callable[[_Block, Tensor], Tensor],
    x: _Inputs,
    out: Tensor,
    dtype: torch.dtype,
    saver: _Saver | None = None,
) -> Tensor:
    """Write ``out`` in place, in its own dtype; return the final states."""
    _check_shapes(x)
    device = x.q.device
    sequences = _sequences(x)
    # Longest first: the sequences still running at any token are then a prefix.
    order = sorted(range(len(sequences)), key=lambda i: -sequences[i][2])
    rows = torch.tensor(order, dtype=torch.int64, device=device)
    with torch.no_grad(), _no_autocast(device):
        if x.initial_state is None:
            state = torch.zeros(len(order), x.v.shape[2], x.v.shape[3], x.q.shape[3], dtype=dtype, device=device)
        else:
            state = x.initial_state[rows].to(dtype)
        done, step = 0, saver.step if saver else 0
        if saver and step:
            saver.visit(order, 0, state)
        for block in _blocks(x, [sequences[i] for i in order], dtype, step):
            active = len(block.token)
            result = block_fn(block, state[:active])  # updates these states in place
            batch = block.batch.expand_as(block.token)[block.valid]
            out[batch, block.token[block.valid]] = result.transpose(1, 2)[block.valid].to(out.dtype)
            done += block.token.shape[1]
            if saver and step:
                saver.visit(order[:active], done, state)
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
    if x.v.dim() != 4 or x.v.shape[:2] != x.q.shape[:2]:
        raise ValueError(f"v must be [B, T, HV, V] with [B, T] = {[B, T]} as in q, got {list(x.v.shape)}")
    HV, V = x.v.shape[2:]
    if (HV % H if H else HV) or (H and not HV):
        raise ValueError(f"v must have a multiple of q's {H} heads, got {list(x.v.shape)}")
    if not x.options.use_gate_in_kernel and not (x.A_log is None and x.dt_bias is None and x.lower_bound is None):
        raise ValueError("A_log, dt_bias and lower_bound must be None with use_gate_in_kernel=False")
    expected = {"k": [B, T, H, K], "g": [B, T, HV, K], "beta": [B, T, HV], "A_log": [HV]}
    for name, shape in expected.items():
        tensor = getattr(x, name)
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} to fit q and v, got {list(tensor.shape)}")
    if x.dt_bias is not None and list(x.dt_bias.shape) not in ([HV, K], [HV * K]):
        raise ValueError(f"dt_bias must be {[HV, K]} or {[HV * K]} to fit v, got {list(x.dt_bias.shape)}")
    N = B
    if x.cu_seqlens is not None:
        if B != 1 or x.cu_seqlens.dim() != 1 or x.cu_seqlens.numel() < 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B == 1, got {list(x.cu_seqlens.shape)} with B == {B}")
        N = x.cu_seqlens.numel() - 1
    if x.initial_state is not None and list(x.initial_state.shape) != [N, HV, V, K]:
        raise ValueError(f"initial_state must be {[N, HV, V, K]}, got {list(x.initial_state.shape)}")


def _sequences(x: _Inputs) -> list[tuple[int, int, int]]:
    """(batch, first token, length) of each sequence."""
    B, T = x.q.shape[:2]
    if x.cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    offsets = [min(max(int(offset), 0), T) for offset in x.cu_seqlens.tolist()]
    return [(0, begin, max(end - begin, 0)) for begin, end in zip(offsets[:-1], offsets[1:])]


def _blocks(
    x: _Inputs, sequences: list[tuple[int, int, int]], dtype: torch.dtype, at_most: int = 0
) -> Iterator[_Block]:
    """The tokens of ``sequences`` (longest first) in blocks of whole chunks, of ``at_most`` tokens each if that is not 0."""
    device, heads, K = x.q.device, x.v.shape[2], x.q.shape[3]
    if heads == 0:
        return
    group = heads // x.q.shape[2]
    limit = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cpu"])

    done = 0
    longest = sequences[0][2] if sequences else 0
    while done < longest:
        active = [s for s in sequences if s[2] > done]
        tokens = max(limit // (len(active) * heads * K) // CHUNK, 1) * CHUNK
        tokens = min(at_most or tokens, -(-(longest - done) // CHUNK) * CHUNK)
        batch, begin, length = (
            torch.tensor(column, dtype=torch.int64, device=device).unsqueeze(1) for column in zip(*active)
        )
        position = torch.arange(done, done + tokens, device=device).unsqueeze(0)
        valid = position < length
        token = torch.where(valid, begin + position, begin)

        # [n, L, H, ...] -> [n, H, L, ...]: an advanced index copies only what it names, whatever the strides.
        qb, kb, vb, gb, bb = (tensor[batch, token].to(dtype).transpose(1, 2) for tensor in (x.q, x.k, x.v, x.g, x.beta))
        if x.options.use_qk_l2norm_in_kernel:
            qb, kb = _normalise(qb), _normalise(kb)
        beta = torch.sigmoid(bb) if x.options.use_beta_sigmoid_in_kernel else bb
        if x.options.allow_neg_eigval:
            beta = 2 * beta
        padding = ~valid.unsqueeze(1)  # [n, 1, L]
        yield _Block(
            batch=batch,
            token=token,
            valid=valid,
            q=(x.scale * qb).repeat_interleave(group, 1),
            k=kb.masked_fill(padding.unsqueeze(-1), 0).repeat_interleave(group, 1),
            v=vb,
            log_decay=_log_decay(x, gb).masked_fill(padding.unsqueeze(-1), 0),
            beta=beta.masked_fill(padding, 0),
        )
        done += tokens


def _log_decay(x: _Inputs, g: Tensor) -> Tensor:
    """Natural-log decay of each token ``[n, HV, L, K]``, at most 0; of g in the same shape."""
    info = torch.finfo(g.dtype)
    if x.options.use_gate_in_kernel:
        heads, K = g.shape[1], g.shape[3]
        rate = torch.ones(heads, dtype=g.dtype, device=g.device) if x.A_log is None else torch.exp(x.A_log.to(g.dtype))
        rate = rate.clamp(max=info.max).view(1, heads, 1, 1)
        if x.dt_bias is not None:
            g = g + x.dt_bias.to(g.dtype).view(1, heads, 1, K)
        if x.lower_bound is not None:
            return x.lower_bound * torch.sigmoid(rate * g)
        # logaddexp(g, 0) is softplus without the shortcut that torch's own takes for large g.
        g = -rate * torch.logaddexp(g, torch.zeros_like(g))
    # A decay below the smallest number is zero; a sum with one far below would cost the other tokens their digits.
    return g.clamp(min=math.log(info.tiny * info.eps) - 1, max=0.0)


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
