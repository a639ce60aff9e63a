"""The argument contract of ``fwd``, and the only place that words its errors.

``check`` looks at what the host can see for free (dtypes, shapes, strides, devices, addresses) and reads the contents of no
tensor on a GPU, so it never waits for one. It stands in front of each launch: the passing path touches each attribute once, and
all wording is done by functions that are called only to fail.

TypeError: not a tensor, not a number, or a dtype that the kernel does not read. ValueError: anything else that is wrong
with an argument. RuntimeError: a gradient was asked for.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

HEAD_DIM = 128
LOWEST_BOUND = -5.0
ALIGN_BYTES = 16  # one vector load
CHECKPOINT_TOKENS = 16  # offsets of checkpoints are multiples of it
SNAPSHOT_TOKENS = 64  # tokens between two intermediate states

_BF16 = torch.bfloat16
_FP32 = torch.float32
_FP32_MAX = torch.finfo(torch.float32).max
_STATE = HEAD_DIM * HEAD_DIM  # elements of one head's state


# What a launch needs, in the order of ``_native.forward`` after device and stream: addresses as integers (0: absent), strides
# in elements for (batch, token, head). A plain tuple: building anything with names costs as much as checking an argument.
Call = tuple[Any, ...]
# Places in it: the address of ``out``, the tokens of a row, value heads, sequences, the address of ``cu_seqlens``, and whether
# no sequence may be cut into segments.
OUT, TOKENS, VALUE_HEADS, SEQUENCES, OFFSETS, WHOLE = 5, 13, 15, 16, 25, 36


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    workspace: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> Call:
    """Check a call of ``fwd`` and take it apart. Writes nothing, launches nothing, waits for nothing.

    Raises:
        TypeError, ValueError, RuntimeError: see the top of this file.
    """
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and isinstance(g, Tensor)
        and isinstance(beta, Tensor)
        and (A_log is None or isinstance(A_log, Tensor))
        and (dt_bias is None or isinstance(dt_bias, Tensor))
        and (out is None or isinstance(out, Tensor))
        and (initial_state is None or isinstance(initial_state, Tensor))
        and (final_state is None or isinstance(final_state, Tensor))
        and (cu_seqlens is None or isinstance(cu_seqlens, Tensor))
    ):
        _not_tensors(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            out=out, initial_state=initial_state, final_state=final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    # Everything that most calls leave as it is, which one comparison each tells.
    extras: dict[str, Tensor | None] = {}
    whole = batch_invariant
    if not (
        use_qk_l2norm_in_kernel is True
        and use_gate_in_kernel is True
        and use_beta_sigmoid_in_kernel is True
        and allow_neg_eigval is False
        and state_v_first is True
        and batch_invariant is False
        and state_indices is None
        and intermediate_states is None
        and checkpoint_states is None
        and checkpoint_offsets is None
        and workspace is None
        and cu_seqlens_cpu is None
    ):
        _check_switches(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first, batch_invariant=batch_invariant,
        )  # fmt: skip
        extras = {
            "state_indices": state_indices, "intermediate_states": intermediate_states, "checkpoint_states": checkpoint_states,
            "checkpoint_offsets": checkpoint_offsets, "workspace": workspace, "cu_seqlens_cpu": cu_seqlens_cpu,
        }  # fmt: skip
        if not all(tensor is None or isinstance(tensor, Tensor) for tensor in extras.values()):
            _not_tensors(**extras)
        whole = batch_invariant or intermediate_states is not None or checkpoint_states is not None

    shape = q.shape
    if len(shape) != 4 or shape[3] != HEAD_DIM:
        _bad_q(q)
    B, T, H, _ = shape
    # Comparing device numbers is quicker than comparing devices, and enough among CUDA tensors: others have the number -1.
    device = q.get_device()
    if not q.is_cuda:
        _check_all_on_cpu(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            out=out, initial_state=initial_state, final_state=final_state, cu_seqlens=cu_seqlens, **extras,
        )  # fmt: skip

    # v, g and out have HV heads, a multiple of those of q and k.
    v_shape = v.shape
    if v_shape == shape:
        HV = H
    else:
        HV = v_shape[2] if len(v_shape) == 4 else 0
        if v_shape != (B, T, HV, HEAD_DIM) or H == 0 or HV == 0 or HV % H:
            _bad_rows("v", v, q, q, A_log)

    # q, k, v, g, out: bf16 (g: or fp32), last dimension dense. Mostly all have the same strides.
    steps, v_steps = q.stride(), v.stride()
    alike = steps[3] == 1 == v_steps[3]
    at: list[int] = []
    for tensor in (q, k):
        if tensor.shape != shape or tensor.dtype is not _BF16 or tensor.get_device() != device:
            _bad_rows(("q", "k")[len(at)], tensor, q, q, A_log)
        if tensor.stride() != steps:
            alike = False
        at.append(tensor.data_ptr())
    g_is_fp32 = g.dtype is _FP32
    for tensor in (v, g) if out is None else (v, g, out):
        if (
            tensor.shape != v_shape
            or not (tensor.dtype is _BF16 or (g_is_fp32 and tensor is g))
            or tensor.get_device() != device
        ):
            _bad_rows(("v", "g", "out")[len(at) - 2], tensor, q, v, A_log)
        if tensor.stride() != v_steps:
            alike = False
        at.append(tensor.data_ptr())
    if alike:
        b, t, h, _ = steps
        q_strides = k_strides = (b, t, h)
        q_bytes = k_bytes = 2 * ((B - 1) * b + (T - 1) * t + (H - 1) * h + HEAD_DIM)
        b, t, h, _ = v_steps
        v_strides = g_strides = out_strides = (b, t, h)
        v_bytes = out_bytes = 2 * ((B - 1) * b + (T - 1) * t + (HV - 1) * h + HEAD_DIM)
        g_bytes = 2 * v_bytes if g_is_fp32 else v_bytes
    else:
        q_strides, q_bytes = _row_layout("q", q)
        k_strides, k_bytes = _row_layout("k", k)
        v_strides, v_bytes = _row_layout("v", v)
        g_strides, g_bytes = _row_layout("g", g)
        if out is not None:
            out_strides, out_bytes = _row_layout("out", out)
    if out is None:
        out_strides = (T * HV * HEAD_DIM, HV * HEAD_DIM, HEAD_DIM)
        out_at = out_bytes = 0
    else:
        out_at = at[4]
        if not out.is_contiguous():
            _check_rows_distinct(out)

    beta_is_fp32 = beta.dtype is _FP32
    if beta.shape != (B, T, HV) or not (beta_is_fp32 or beta.dtype is _BF16) or beta.get_device() != device:
        _bad_beta(beta, q, HV, A_log)
    beta_at = beta.data_ptr()
    b, t, h = beta.stride()
    beta_strides = (b, t, h)
    beta_bytes = (4 if beta_is_fp32 else 2) * ((B - 1) * b + (T - 1) * t + (HV - 1) * h + 1)

    A_log_at = dt_bias_at = 0
    if A_log is not None:
        if (
            A_log.shape != (HV,)
            or A_log.dtype is not _FP32
            or A_log.get_device() != device
            or not A_log.is_contiguous()
        ):
            _bad_A_log(A_log, q, HV)
        A_log_at = A_log.data_ptr()
    if dt_bias is not None:
        bias_shape = dt_bias.shape
        if (
            (bias_shape != (HV, HEAD_DIM) and bias_shape != (HV * HEAD_DIM,))
            or dt_bias.dtype is not _FP32
            or dt_bias.get_device() != device
            or not dt_bias.is_contiguous()
        ):
            _bad_dt_bias(dt_bias, q, HV)
        dt_bias_at = dt_bias.data_ptr()

    cu_at, cu_is_int64, N = 0, False, B
    if cu_seqlens is not None:
        dtype = cu_seqlens.dtype
        cu_is_int64 = dtype is torch.int64
        offsets = cu_seqlens.shape
        if (
            len(offsets) != 1
            or offsets[0] == 0
            or B != 1
            or not (cu_is_int64 or dtype is torch.int32)
            or cu_seqlens.get_device() != device
            or not cu_seqlens.is_contiguous()
        ):
            _bad_cu_seqlens(cu_seqlens, q)
        cu_at, N = cu_seqlens.data_ptr(), offsets[0] - 1

    # States: [N, HV, V, K], or rows of a pool with indices; each state dense, 16-byte aligned, fp32 or bf16.
    initial_at = final_at = initial_row = final_row = initial_rows = final_rows = 0
    initial_is_fp32 = final_is_fp32 = False
    if initial_state is not None:
        dtype = initial_state.dtype
        initial_is_fp32 = dtype is _FP32
        initial_at = initial_state.data_ptr()
        initial_rows, initial_row = N, HV * _STATE
        if (
            initial_state.shape != (N, HV, HEAD_DIM, HEAD_DIM)
            or not (initial_is_fp32 or dtype is _BF16)
            or initial_state.get_device() != device
            or not initial_state.is_contiguous()
            or initial_at & (ALIGN_BYTES - 1)
            or state_indices is not None
        ):
            initial_rows, initial_row = _state_rows(
                "initial_state", initial_state, N, HV, q, cu_seqlens, state_indices, state_v_first
            )
    if final_state is not None:
        dtype = final_state.dtype
        final_is_fp32 = dtype is _FP32
        final_at = final_state.data_ptr()
        final_rows, final_row = N, HV * _STATE
        if (
            final_state.shape != (N, HV, HEAD_DIM, HEAD_DIM)
            or not (final_is_fp32 or dtype is _BF16)
            or final_state.get_device() != device
            or not final_state.is_contiguous()
            or final_at & (ALIGN_BYTES - 1)
            or state_indices is not None
        ):
            final_rows, final_row = _state_rows(
                "final_state", final_state, N, HV, q, cu_seqlens, state_indices, state_v_first
            )

    if type(scale) is not float:
        scale = _number("scale", scale, "128 ** -0.5")
    if not -_FP32_MAX <= scale <= _FP32_MAX:
        raise ValueError(f"scale: expected a number that is finite in fp32 (usually 128 ** -0.5), got {scale}")
    if lower_bound is not None:
        if type(lower_bound) is not float:
            lower_bound = _number("lower_bound", lower_bound, "-5.0")
        if not LOWEST_BOUND <= lower_bound < 0.0:
            _bad_lower_bound(lower_bound)
    if not use_gate_in_kernel and not (A_log is None and dt_bias is None and lower_bound is None):
        _parameters_without_gate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)

    if (
        0 in at
        or not beta_at
        or (A_log is not None and not A_log_at)
        or (dt_bias is not None and not dt_bias_at)
        or (cu_seqlens is not None and not cu_at)
        or (initial_state is not None and not initial_at)
        or (final_state is not None and not final_at)
    ):
        _check_memory(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            out=out, initial_state=initial_state, final_state=final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    # Results may share no memory with what is read, since parts of the call run in any order. One exception: final_state may
    # be initial_state itself (the kernels have read a state before they write it).
    if out is not None or final_state is not None:
        final_size, initial_size = 4 if final_is_fp32 else 2, 4 if initial_is_fp32 else 2
        final_bytes = final_size * ((final_rows - 1) * final_row + HV * _STATE) if final_rows else 0
        initial_bytes = initial_size * ((initial_rows - 1) * initial_row + HV * _STATE) if initial_rows else 0
        if initial_at == final_at and initial_is_fp32 is final_is_fp32 and initial_row == final_row:
            initial_bytes = 0
        out_end, final_end = out_at + out_bytes, final_at + final_bytes
        for begin, size in (
            (at[0], q_bytes), (at[1], k_bytes), (at[2], v_bytes), (at[3], g_bytes), (beta_at, beta_bytes),
            (A_log_at, 4 * HV), (dt_bias_at, 4 * HV * HEAD_DIM), (cu_at, 8 * N + 8 if cu_is_int64 else 4 * N + 4),
            (initial_at, initial_bytes),
        ):  # fmt: skip
            if (begin < out_end and out_at < begin + size) or (begin < final_end and final_at < begin + size):
                reads = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
                         "cu_seqlens": cu_seqlens, "initial_state": initial_state}  # fmt: skip
                _check_overlap("out", out, reads)
                _check_overlap("final_state", final_state, reads)
                break
        if final_at < out_end and out_at < final_end:
            _check_overlap("final_state", final_state, {"out": out})

    indices = intermediate = checkpoint = None
    if extras:
        arguments = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
            "initial_state": initial_state, "out": out, "final_state": final_state,
        }  # fmt: skip
        indices, intermediate, checkpoint = _check_extras(arguments, extras, N, HV, initial_rows, final_rows)

    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
        or (A_log is not None and A_log.requires_grad)
        or (dt_bias is not None and dt_bias.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
        or (out is not None and out.requires_grad)
        or (final_state is not None and final_state.requires_grad)
        or (intermediate_states is not None and intermediate_states.requires_grad)
        or (checkpoint_states is not None and checkpoint_states.requires_grad)
    ):
        refuse_gradient(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, out=out,
            final_state=final_state, intermediate_states=intermediate_states, checkpoint_states=checkpoint_states,
        )  # fmt: skip

    return (
        at[0], at[1], at[2], at[3], beta_at, out_at,
        q_strides, k_strides, v_strides, g_strides, beta_strides, out_strides,
        B, T, H, HV, N, A_log_at, dt_bias_at,
        initial_at, initial_is_fp32, initial_row, final_at, final_is_fp32, final_row,
        cu_at, cu_is_int64, scale, lower_bound, g_is_fp32, beta_is_fp32,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        whole, indices, intermediate, checkpoint,
    )  # fmt: skip


# ---- what few calls have


def _check_switches(**switches: bool) -> None:
    for name, value in switches.items():
        if value is not True and value is not False:
            raise TypeError(f"{name}: expected True or False, got {type(value).__name__} {value!r}")


Extra = Optional[tuple[Any, ...]]


def _check_extras(
    arguments: dict[str, Tensor | None],
    extras: dict[str, Tensor | None],
    N: int,
    HV: int,
    initial_rows: int,
    final_rows: int,
) -> tuple[Extra, Extra, Extra]:
    """What the launch needs of slots, intermediate states and checkpoints, each None if it is not asked for.

    Slots: address, whether int64, rows of the pools. Intermediate states: address, whether fp32, rows. Checkpoints: address,
    whether fp32, how many a sequence, address of their offsets, whether int64.
    """
    q, cu_seqlens, final_state = arguments["q"], arguments["cu_seqlens"], arguments["final_state"]
    assert q is not None
    indices, intermediate = extras["state_indices"], extras["intermediate_states"]
    checkpoint, offsets = extras["checkpoint_states"], extras["checkpoint_offsets"]
    lengths = _host_lengths(extras["cu_seqlens_cpu"], cu_seqlens, q)

    slots: Extra = None
    if indices is not None:
        if arguments["initial_state"] is None and final_state is None:
            raise ValueError("state_indices: expected initial_state or final_state with it, got neither; pass the pool")
        if arguments["initial_state"] is not None and final_state is not None and initial_rows != final_rows:
            raise ValueError(
                f"state_indices: expected pools of as many rows, got initial_state with {initial_rows} and final_state with "
                f"{final_rows}; the same index selects a row of both"
            )
        _check_integers("state_indices", indices, [[N]], q)
        if final_state is not None and not indices.is_cuda:
            used = [row for row in indices.tolist() if row >= 0]
            if len(used) != len(set(used)):
                raise ValueError(
                    f"state_indices: expected different rows for final_state, got {indices.tolist()}; "
                    "sequences that need no state of their own take a negative index"
                )
        slots = (indices.data_ptr(), indices.dtype is torch.int64, max(initial_rows, final_rows))

    snapshots: Extra = None
    if intermediate is not None:
        B, T = q.shape[:2]
        if lengths is None and cu_seqlens is None:
            lengths = [T] * B
        needed = 0 if lengths is None else sum(-(-length // SNAPSHOT_TOKENS) for length in lengths)
        if (
            intermediate.dim() != 4
            or intermediate.shape[1:] != (HV, HEAD_DIM, HEAD_DIM)
            or intermediate.shape[0] < needed
        ):
            rows = f"sum of ceil(length / {SNAPSHOT_TOKENS})" + (f" = {needed}" if lengths is not None else "")
            raise ValueError(
                f"intermediate_states: expected [rows, HV, V, K] = [rows, {HV}, {HEAD_DIM}, {HEAD_DIM}] with at least {rows} rows, "
                f"got {list(intermediate.shape)}"
            )
        _check_written_states("intermediate_states", intermediate, q)
        snapshots = (intermediate.data_ptr(), intermediate.dtype is _FP32, intermediate.shape[0])

    marks: Extra = None
    if (checkpoint is None) != (offsets is None):
        given, missing = ("checkpoint_states", "checkpoint_offsets")[:: 1 if offsets is None else -1]
        raise ValueError(f"{missing}: expected it together with {given}, got None; pass both or neither")
    if checkpoint is not None and offsets is not None:
        several = checkpoint.dim() == 5
        expected = [N, 2, HV, HEAD_DIM, HEAD_DIM] if several else [N, HV, HEAD_DIM, HEAD_DIM]
        if list(checkpoint.shape) != expected:
            raise ValueError(
                f"checkpoint_states: expected [N, HV, V, K] = {[N, HV, HEAD_DIM, HEAD_DIM]} or [N, 2, HV, V, K], "
                f"got {list(checkpoint.shape)}"
            )
        _check_written_states("checkpoint_states", checkpoint, q)
        _check_integers("checkpoint_offsets", offsets, [expected[: 2 if several else 1]], q)
        marks = (
            checkpoint.data_ptr(), checkpoint.dtype is _FP32, 2 if several else 1, offsets.data_ptr(),
            offsets.dtype is torch.int64,
        )  # fmt: skip

    workspace = extras["workspace"]
    if workspace is not None:
        if workspace.dtype is not torch.uint8:
            _bad_dtype("workspace", workspace, "uint8")
        if workspace.device != q.device:
            _bad_device("workspace", workspace, q.device)
        if not workspace.is_contiguous():
            _not_contiguous("workspace", workspace)
        if workspace.data_ptr() % ALIGN_BYTES:
            _misaligned("workspace", workspace)

    _check_memory(**extras)
    reads = {name: arguments[name] for name in arguments if name not in ("out", "final_state")}
    reads |= {name: extras[name] for name in ("state_indices", "checkpoint_offsets")}
    written = {"out": arguments["out"], "final_state": final_state}
    _check_overlap("out", arguments["out"], {n: extras[n] for n in ("state_indices", "checkpoint_offsets")})
    _check_overlap("final_state", final_state, {n: extras[n] for n in ("state_indices", "checkpoint_offsets")})
    for name in ("intermediate_states", "checkpoint_states", "workspace"):
        _check_overlap(name, extras[name], {**reads, **written})
        written[name] = extras[name]
    return slots, snapshots, marks


def _host_lengths(copy: Tensor | None, cu_seqlens: Tensor | None, q: Tensor) -> list[int] | None:
    """Lengths by the host's copy of the offsets, which is checked where those on the GPU cannot be; None without a copy."""
    if copy is None:
        return None
    if cu_seqlens is None:
        raise ValueError(
            "cu_seqlens_cpu: expected cu_seqlens with it, got None; it is only a copy of that for the host"
        )
    if copy.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu: expected it on the CPU, got {copy.device}; pass cu_seqlens_cpu.cpu()")
    if copy.dtype not in (torch.int32, torch.int64):
        _bad_dtype("cu_seqlens_cpu", copy, "int32 or int64")
    if copy.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected the shape of cu_seqlens, {list(cu_seqlens.shape)}, got {list(copy.shape)}"
        )
    if not copy.data_ptr():
        _check_memory(cu_seqlens_cpu=copy)
    offsets = copy.tolist()
    T = q.shape[1]
    if offsets[0] < 0 or offsets[-1] > T or any(begin > end for begin, end in zip(offsets, offsets[1:])):
        few = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-3:]]
        raise ValueError(
            f"cu_seqlens_cpu: expected offsets that rise from 0 or more to at most T = {T}, got {few}; "
            "each sequence ends where the next begins"
        )
    return [end - begin for begin, end in zip(offsets, offsets[1:])]


def _check_integers(name: str, tensor: Tensor, shapes: list[list[int]], q: Tensor) -> None:
    if list(tensor.shape) not in shapes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, shapes))}, got {list(tensor.shape)}")
    if tensor.dtype not in (torch.int32, torch.int64):
        _bad_dtype(name, tensor, "int32 or int64")
    if tensor.device != q.device:
        _bad_device(name, tensor, q.device)
    if not tensor.is_contiguous():
        _not_contiguous(name, tensor)


def _check_written_states(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype not in (_FP32, _BF16):
        _bad_dtype(name, tensor, "float32 or bfloat16")
    if tensor.device != q.device:
        _bad_device(name, tensor, q.device)
    if not tensor.is_contiguous():
        _not_contiguous(name, tensor)
    if tensor.data_ptr() % ALIGN_BYTES:
        _misaligned(name, tensor)


def keep_whole(batch_invariant: bool, enable_cp: bool | None) -> bool:
    """``batch_invariant``, or what sglang's name for its opposite says."""
    if enable_cp is None:
        return batch_invariant
    _check_switches(enable_cp=enable_cp)
    if enable_cp and batch_invariant:
        raise ValueError(
            "enable_cp: expected None or False with batch_invariant=True, got True; one asks to cut sequences into segments, "
            "the other not to"
        )
    return not enable_cp


def check_workspace(workspace: Tensor, needed: int) -> None:
    """Refuse a workspace of fewer bytes than a call needs."""
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace: expected at least {needed} bytes, got {workspace.numel()}; pass torch.empty("
            "flash_kda.get_workspace_size(B * T, HV, N), dtype=torch.uint8, device=q.device), or None"
        )


# ---- layouts, carefully


def _row_layout(name: str, tensor: Tensor) -> tuple[tuple[int, int, int], int]:
    """(Batch, token, head) strides of q, k, v, g or out, and the bytes from its first to its last element.

    Raises if the last dimension is not dense.
    """
    if tensor.numel() == 0:
        return (0, 0, 0), 0
    *outer, last = tensor.stride()
    if last != 1:
        raise ValueError(
            f"{name}: expected a dense last dimension (stride 1), got strides {tuple(tensor.stride())} "
            f"for shape {list(tensor.shape)}. The usual cause is a transpose of the last dimension; pass {name}.contiguous()."
        )
    # A dimension of size 1 is never stepped along: its stride means nothing.
    b, t, h = (0 if size == 1 else stride for size, stride in zip(tensor.shape, outer))
    B, T, H, _ = tensor.shape
    return (b, t, h), tensor.element_size() * ((B - 1) * b + (T - 1) * t + (H - 1) * h + HEAD_DIM)


def _state_rows(
    name: str,
    tensor: Tensor,
    N: int,
    HV: int,
    q: Tensor,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    v_first: bool,
) -> tuple[int, int]:
    """Rows of a tensor of states, and the elements from one to the next. Raises if the kernel cannot take it."""
    fits = tensor.dim() == 4 and tensor.shape[1:] == (HV, HEAD_DIM, HEAD_DIM)
    if not fits or (indices is None and tensor.shape[0] != N):
        _bad_state(name, tensor, N, HV, cu_seqlens, indices, v_first)
    if tensor.dtype not in (_FP32, _BF16):
        _bad_dtype(name, tensor, "float32 or bfloat16")
    if tensor.device != q.device:
        _bad_device(name, tensor, q.device)
    rows, step = tensor.shape[0], HV * _STATE
    if not tensor.is_contiguous():
        # Rows of a wider pool: each state dense, and heads one after the other.
        step = tensor.stride(0)
        if not tensor[0].is_contiguous() or step < HV * _STATE:
            _not_contiguous(name, tensor)
        if step * tensor.element_size() % ALIGN_BYTES:
            raise ValueError(
                f"{name}: expected rows that are a multiple of {ALIGN_BYTES} bytes apart, "
                f"got {step * tensor.element_size()}; pad the pool's rows"
            )
    if tensor.data_ptr() % ALIGN_BYTES:
        _misaligned(name, tensor)
    return rows, step


def _check_rows_distinct(out: Tensor) -> None:
    """Refuse an ``out`` whose rows share memory with one another, such as an expanded tensor."""
    extent = HEAD_DIM
    for stride, size in sorted((stride, size) for stride, size in zip(out.stride()[:3], out.shape[:3]) if size > 1):
        if stride < extent and out.numel():
            raise ValueError(
                f"out: expected rows of memory of their own, got strides {tuple(out.stride())} for shape {list(out.shape)} "
                "(an expanded tensor?); pass a tensor from torch.empty, or out=None"
            )
        extent = stride * (size - 1) + extent


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose address ranges meet may share an element.

    Two slices of one fused buffer do not, although their ranges interleave: seen modulo the buffer's row (a stride that both
    have) they lie apart. Anything less regular counts as shared.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    for pitch in {stride * a.element_size() for stride in a.stride()} & {
        stride * b.element_size() for stride in b.stride()
    }:
        if pitch:
            offset = (b.data_ptr() - a.data_ptr()) % pitch
            if _width(a, pitch) <= offset and offset + _width(b, pitch) <= pitch:
                return False
    return True


def _width(tensor: Tensor, pitch: int) -> int:
    """Bytes that the tensor spans in each row, if memory is seen as rows of ``pitch`` bytes and its first element starts one."""
    size = tensor.element_size()
    width: int = size
    for stride, count in zip(tensor.stride(), tensor.shape):
        if count > 1 and stride * size % pitch:
            width += stride * size * (count - 1)
    return width


def _check_overlap(written: str, tensor: Tensor | None, others: dict[str, Tensor | None]) -> None:
    """The careful form of the quick test on address ranges."""
    if tensor is None:
        return
    for name, other in others.items():
        if other is None or not _ranges_meet(tensor, other) or not _share(tensor, other):
            continue
        same = (
            other.data_ptr() == tensor.data_ptr() and other.dtype is tensor.dtype and other.stride() == tensor.stride()
        )
        if written == "final_state" and name == "initial_state" and same:
            continue
        allowed = (
            " (only the very same tensor may serve as both)"
            if {written, name} == {"final_state", "initial_state"}
            else ""
        )
        raise ValueError(
            f"{written}: expected memory of its own, but it overlaps {name}{allowed}; pass a separate tensor"
        )


def _ranges_meet(a: Tensor, b: Tensor) -> bool:
    (a_begin, a_end), (b_begin, b_end) = _range(a), _range(b)
    return a_begin < b_end and b_begin < a_end


def _range(tensor: Tensor) -> tuple[int, int]:
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


# ---- wording: each of these raises


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def _not_tensors(**arguments: Any) -> NoReturn:
    needed = ("q", "k", "v", "g", "beta")
    name, value = next(
        (name, value)
        for name, value in arguments.items()
        if not isinstance(value, Tensor) and not (value is None and name not in needed)
    )
    hint = ""
    if name in ("cu_seqlens", "state_indices", "checkpoint_offsets") and isinstance(value, (list, tuple)):
        hint = f"; pass torch.tensor({name}, dtype=torch.int64, device=q.device)"
    elif name == "cu_seqlens_cpu" and isinstance(value, (list, tuple)):
        hint = "; pass torch.tensor(cu_seqlens_cpu)"
    elif name == "final_state" and isinstance(value, bool):
        hint = "; the final state is written in place, so pass a tensor [N, HV, V, K] to receive it, or None"
    elif isinstance(value, bool):
        hint = "; it is written in place, so pass a tensor to receive it, or None"
    raise TypeError(
        f"{name}: expected a torch.Tensor{'' if name in needed else ' or None'}, got {type(value).__name__}{hint}"
    )


def _check_all_on_cpu(**arguments: Tensor | None) -> None:
    q = arguments["q"]
    assert q is not None
    if q.device.type != "cpu":
        raise ValueError(f"q: expected a CUDA or CPU tensor, got one on {q.device}")
    for name, tensor in arguments.items():
        if tensor is not None and tensor.device != q.device and name != "cu_seqlens_cpu":
            _bad_device(name, tensor, q.device)


def _check_memory(**arguments: Tensor | None) -> None:
    """Refuse tensors that hold elements but no memory; those without elements lie at address 0 by right."""
    for name, tensor in arguments.items():
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            raise ValueError(
                f"{name}: expected a tensor that holds memory, got a {type(tensor).__name__} {list(tensor.shape)} at address 0. "
                "Fake and traced tensors hold none, nor does one whose storage was freed; "
                f"of a distributed tensor pass {name}.to_local()."
            )


def _number(name: str, value: Any, usual: str) -> float:
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a Python number (usually {usual}), got a tensor; reading it would wait for the GPU, "
            f"so convert it once, outside: float({name})"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a Python number (usually {usual}), got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number (usually {usual}), got one that overflows fp64") from None


_TRANSPOSED = (
    "The usual mistake is [B, H, T, D]: tokens come before heads here; pass x.transpose(1, 2) for q, k, v, g and out."
)


def _heads_before_tokens(q: Tensor, A_log: Tensor | None) -> bool:
    """Whether q looks like [B, H, T, D]: A_log has one entry a head, and as many as q's second dimension."""
    return bool(A_log is not None and A_log.numel() == q.shape[1] != q.shape[2])


def _bad_q(q: Tensor) -> NoReturn:
    hint = ""
    if q.dim() == 3 and q.shape[2] == HEAD_DIM:
        hint = " For a packed [T, H, 128] tensor pass q.unsqueeze(0), and the same for k, v, g, beta and out."
    elif q.dim() == 3:
        hint = " Split the projection into heads: q.view(B, T, H, 128)."
    elif q.dim() == 4 and HEAD_DIM in q.shape[1:3]:
        hint = " The head dimension comes last."
    elif q.dim() == 4:
        hint = f" Only head dimension {HEAD_DIM} is supported."
    raise ValueError(f"q: expected [B, T, H, {HEAD_DIM}], got {list(q.shape)}.{hint}")


def _bad_rows(name: str, tensor: Tensor, q: Tensor, like: Tensor, A_log: Tensor | None) -> NoReturn:
    """``like``: the tensor whose shape it should have, q or v."""
    B, T, H, _ = q.shape
    if tensor.shape != like.shape:
        right = f"the shape of q, [B, T, H, {HEAD_DIM}] = {list(q.shape)}"
        if name == "v":
            right = f"[B, T, HV, {HEAD_DIM}] with [B, T] = {[B, T]} and HV a multiple of q's {H} heads"
        elif name in ("g", "out"):
            right = f"the shape of v, [B, T, HV, {HEAD_DIM}] = {list(like.shape)}"
        message = f"{name}: expected {right}, got {list(tensor.shape)}."
        if tensor.dim() == 4 and tensor.shape == like.transpose(1, 2).shape:
            message += f" {_TRANSPOSED}"
        elif name == "k" and tensor.dim() == 4 and tensor.shape[:2] == q.shape[:2] and tensor.shape[3] == HEAD_DIM:
            message += " Only value heads may be more than query heads, and k has as many as q."
        elif tensor.dim() == 4 and tensor.shape[:3] == like.shape[:3]:
            message += f" Only head dimension {HEAD_DIM} is supported, for keys and values alike."
        elif name == "g" and tensor.shape == like.shape[:3]:
            message += " The gate of Kimi Delta Attention has one value per channel, not one per head."
        elif tensor.dim() == 3 and tensor.numel() == like.numel():
            message += f" Split the projection into heads: {name}.view({', '.join(map(str, like.shape))})."
        elif _heads_before_tokens(q, A_log):
            message += f" q looks like [B, H, T, D] (A_log has {q.shape[1]} heads). {_TRANSPOSED}"
        raise ValueError(message)
    if tensor.dtype is not _BF16 and not (name == "g" and tensor.dtype is _FP32):
        _bad_dtype(name, tensor, "bfloat16 or float32" if name == "g" else "bfloat16")
    _bad_device(name, tensor, q.device)


def _bad_beta(beta: Tensor, q: Tensor, HV: int, A_log: Tensor | None) -> NoReturn:
    B, T, _, _ = q.shape
    if beta.shape != (B, T, HV):
        message = f"beta: expected [B, T, HV] = {[B, T, HV]} to fit v, got {list(beta.shape)}."
        if list(beta.shape) == [B, T, HV, 1]:
            message += " Pass beta.squeeze(-1)."
        elif list(beta.shape) == [B, T, HV, HEAD_DIM]:
            message += " There is one beta per token and head, not one per channel."
        elif _heads_before_tokens(q, A_log):
            message += f" q looks like [B, H, T, D] (A_log has {q.shape[1]} heads). {_TRANSPOSED}"
        elif list(beta.shape) == [B, HV, T]:
            message += " The usual mistake is [B, H, T]; pass beta.transpose(1, 2)."
        elif list(beta.shape) == [B, T, q.shape[2]]:
            message += " There is one beta per value head."
        raise ValueError(message)
    if beta.dtype not in (_BF16, _FP32):
        _bad_dtype("beta", beta, "bfloat16 or float32")
    _bad_device("beta", beta, q.device)


def _bad_A_log(A_log: Tensor, q: Tensor, HV: int) -> NoReturn:
    if A_log.shape != (HV,):
        message = f"A_log: expected [HV] = [{HV}] to fit v, got {list(A_log.shape)}."
        if A_log.numel() == HV:
            message += " Pass A_log.view(-1)."
        elif _heads_before_tokens(q, A_log):
            message += f" q, k, v, g and beta look as if heads came first. {_TRANSPOSED} beta is [B, T, HV]."
        elif list(A_log.shape) == [q.shape[2]]:
            message += " It has one entry per value head."
        raise ValueError(message)
    _bad_parameter("A_log", A_log, q.device)


def _bad_dt_bias(dt_bias: Tensor, q: Tensor, HV: int) -> NoReturn:
    if list(dt_bias.shape) not in ([HV, HEAD_DIM], [HV * HEAD_DIM]):
        message = (
            f"dt_bias: expected {[HV, HEAD_DIM]} or {[HV * HEAD_DIM]} ([HV, K] or [HV * K]), got {list(dt_bias.shape)}."
        )
        if dt_bias.numel() == HV * HEAD_DIM:
            message += f" Pass dt_bias.view({HV}, {HEAD_DIM}) if heads come first in it."
        elif list(dt_bias.shape) == [HV]:
            message += f" There is one bias per head and channel: pass dt_bias.unsqueeze(1).expand({HV}, {HEAD_DIM}).contiguous()."
        elif list(dt_bias.shape) == [HEAD_DIM]:
            message += f" There is one bias per head and channel: pass dt_bias.expand({HV}, {HEAD_DIM}).contiguous()."
        raise ValueError(message)
    _bad_parameter("dt_bias", dt_bias, q.device)


def _bad_parameter(name: str, tensor: Tensor, device: torch.device) -> NoReturn:
    if tensor.dtype is not _FP32:
        _bad_dtype(name, tensor, "float32")
    if tensor.device != device:
        _bad_device(name, tensor, device)
    _not_contiguous(name, tensor)


def _bad_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> NoReturn:
    B, T = q.shape[:2]
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens: expected [N + 1] offsets, beginning with 0, of N sequences laid end to end, "
            f"got {list(cu_seqlens.shape)}"
        )
    if B != 1:
        raise ValueError(
            f"cu_seqlens: expected B == 1 with it, since sequences are laid end to end along T, got B == {B}. "
            f"Flatten q, k, v, g, beta and out to [1, {B * T}, ...], or leave cu_seqlens out if each row of the batch "
            "is one sequence."
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        _bad_dtype("cu_seqlens", cu_seqlens, "int32 or int64")
    if cu_seqlens.device != q.device:
        _bad_device("cu_seqlens", cu_seqlens, q.device)
    _not_contiguous("cu_seqlens", cu_seqlens)


def _bad_state(
    name: str, tensor: Tensor, N: int, HV: int, cu_seqlens: Tensor | None, indices: Tensor | None, v_first: bool
) -> NoReturn:
    last = "V, K" if v_first else "K, V"
    if indices is not None:
        raise ValueError(
            f"{name}: expected a pool [rows, HV, {last}] = [rows, {HV}, {HEAD_DIM}, {HEAD_DIM}], since there are state_indices, "
            f"got {list(tensor.shape)}"
        )
    source = "B" if cu_seqlens is None else "len(cu_seqlens) - 1"
    message = (
        f"{name}: expected [N, HV, {last}] = {[N, HV, HEAD_DIM, HEAD_DIM]} with N = {source}, got {list(tensor.shape)}."
    )
    if tensor.dim() == 3 and N == 1:
        message += f" Pass {name}.unsqueeze(0)."
    elif tensor.dim() == 4 and tensor.shape[0] != N and tensor.shape[1] == HV and cu_seqlens is not None:
        message += (
            " There is one state per sequence, empty ones included; rows of a pool are chosen with state_indices."
        )
    elif tensor.dim() == 4 and tensor.shape[0] == N and tensor.shape[1] != HV:
        message += " There is one state per value head."
    raise ValueError(message)


def _bad_dtype(name: str, tensor: Tensor, expected: str) -> NoReturn:
    hint = ""
    if name in ("q", "k", "v", "g", "beta"):
        hint = f"; pass {name}.to(torch.bfloat16)"
    elif name in ("A_log", "dt_bias"):
        hint = f"; pass {name}.float()"
    elif expected == "int32 or int64":
        hint = f"; pass {name}.to(torch.int32)"
    raise TypeError(f"{name}: expected {expected}, got {_name(tensor.dtype)} {list(tensor.shape)}{hint}")


def _bad_device(name: str, tensor: Tensor, device: torch.device) -> NoReturn:
    raise ValueError(f"{name}: expected it on {device} like q, got {tensor.device}; pass {name}.to(q.device)")


_WRITTEN = ("out", "final_state", "intermediate_states", "checkpoint_states", "workspace")


def _not_contiguous(name: str, tensor: Tensor) -> NoReturn:
    cure = "pass a contiguous tensor to write into" if name in _WRITTEN else f"pass {name}.contiguous()"
    raise ValueError(
        f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())} for shape {list(tensor.shape)}; {cure}"
    )


def _misaligned(name: str, tensor: Tensor) -> NoReturn:
    raise ValueError(
        f"{name}: expected an address that is a multiple of {ALIGN_BYTES} bytes, got {tensor.data_ptr():#x} "
        f"(storage offset {tensor.storage_offset()} elements); pass a tensor of its own"
    )


def _parameters_without_gate(**parameters: Any) -> NoReturn:
    name = next(name for name, value in parameters.items() if value is not None)
    raise ValueError(
        f"{name}: expected None with use_gate_in_kernel=False, where g is the log-decay itself, got "
        f"{type(parameters[name]).__name__}; leave it out, or let the gate be computed inside"
    )


def _bad_lower_bound(value: float) -> NoReturn:
    hint = ""
    if 0 < value <= -LOWEST_BOUND:
        hint = f". It is the log-decay of a fully open gate, so it is negative: {-value}?"
    elif value == 0:
        hint = ". With 0 nothing would ever decay"
    elif math.isfinite(value) and value < LOWEST_BOUND:
        hint = ". A stronger decay per token is not supported"
    raise ValueError(f"lower_bound: expected a number in [{LOWEST_BOUND}, 0), usually -5.0, got {value}{hint}")


def refuse_gradient(**arguments: Tensor | None) -> None:
    """Raise if gradients are recorded and a tensor requires one: none is computed, and it would be lost silently."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in arguments.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and flash_kda.fwd computes none (forward only). "
                f"Call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()."
            )


def refuse_tangents(**arguments: Tensor | None) -> None:
    """Raise if a tensor carries a tangent of forward-mode differentiation, which would be lost silently."""
    for name, tensor in arguments.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name} carries a tangent, and flash_kda.fwd computes no derivatives (forward only). "
                f"Pass torch.autograd.forward_ad.unpack_dual({name}).primal."
            )
