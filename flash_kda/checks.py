"""The argument contract of ``fwd``, and the only place that words its errors.

``check`` looks at what the host can see for free (dtypes, shapes, strides, devices, addresses) and reads no tensor's
contents, so it never waits for a GPU. It stands in front of each launch: the passing path touches each attribute once, and
all wording is done by functions that are called only to fail.

TypeError: not a tensor, not a number, or a dtype that the kernel does not read. ValueError: anything else that is wrong
with an argument. RuntimeError: a gradient was asked for.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

import torch
from torch import Tensor

HEAD_DIM = 128
LOWEST_BOUND = -5.0
ALIGN_BYTES = 16  # one vector load
ALIGN_ELEMENTS = 8  # the same, in bf16

_BF16 = torch.bfloat16
_FP32 = torch.float32
_FP32_MAX = torch.finfo(torch.float32).max

_ROWS = ("q", "k", "v", "g", "out")  # the arguments that share one layout


# What a launch needs, in the order of ``_native.forward`` after device and stream: addresses as integers (0: absent), strides
# in elements for (batch, token, head). A plain tuple: building anything with names costs as much as checking an argument.
Call = tuple[Any, ...]
# Places in it: the address of ``out``, three counts, the address of ``cu_seqlens``.
OUT, TOKENS, HEADS, SEQUENCES, OFFSETS = 5, 13, 14, 15, 22


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
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
        and isinstance(A_log, Tensor)
        and isinstance(dt_bias, Tensor)
        and (out is None or isinstance(out, Tensor))
        and (initial_state is None or isinstance(initial_state, Tensor))
        and (final_state is None or isinstance(final_state, Tensor))
        and (cu_seqlens is None or isinstance(cu_seqlens, Tensor))
    ):
        _not_tensors(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            out=out, initial_state=initial_state, final_state=final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    shape = q.shape
    if len(shape) != 4 or shape[3] != HEAD_DIM:
        _bad_q(q)
    B, T, H, _ = shape
    # Comparing device numbers is quicker than comparing devices, and enough among CUDA tensors: others have the number -1.
    device = q.get_device()
    if not q.is_cuda:
        _check_all_on_cpu(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            out=out, initial_state=initial_state, final_state=final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    # q, k, v, g, out: bf16, shaped as q, last dimension dense, every row 16-byte aligned. Mostly all have the strides of q.
    steps = q.stride()
    b, t, h, dense = steps
    alike = dense == 1 and not (b | t | h) & (ALIGN_ELEMENTS - 1)
    at: list[int] = []
    low = 0
    for tensor in (q, k, v, g) if out is None else (q, k, v, g, out):
        if tensor.shape != shape or tensor.dtype is not _BF16 or tensor.get_device() != device:
            _bad_rows(_ROWS[len(at)], tensor, q, A_log)
        if tensor.stride() != steps:
            alike = False
        address = tensor.data_ptr()
        low |= address
        at.append(address)
    if alike and not low & (ALIGN_BYTES - 1):
        q_strides = k_strides = v_strides = g_strides = out_strides = (b, t, h)
        q_bytes = k_bytes = v_bytes = g_bytes = out_bytes = 2 * ((B - 1) * b + (T - 1) * t + (H - 1) * h + HEAD_DIM)
    else:
        q_strides, q_bytes = _row_layout("q", q)
        k_strides, k_bytes = _row_layout("k", k)
        v_strides, v_bytes = _row_layout("v", v)
        g_strides, g_bytes = _row_layout("g", g)
        if out is not None:
            out_strides, out_bytes = _row_layout("out", out)
    if out is None:
        out_strides = (T * H * HEAD_DIM, H * HEAD_DIM, HEAD_DIM)
        out_at = out_bytes = 0
    else:
        out_at = at[4]
        if not out.is_contiguous():
            _check_rows_distinct(out)

    if beta.shape != (B, T, H) or beta.dtype is not _BF16 or beta.get_device() != device:
        _bad_beta(beta, q, A_log)
    beta_at = beta.data_ptr()
    b, t, h = beta.stride()
    beta_strides = (b, t, h)
    beta_bytes = 2 * ((B - 1) * b + (T - 1) * t + (H - 1) * h + 1)

    if A_log.shape != (H,) or A_log.dtype is not _FP32 or A_log.get_device() != device or not A_log.is_contiguous():
        _bad_A_log(A_log, q)
    A_log_at = A_log.data_ptr()
    bias_shape = dt_bias.shape
    if (
        (bias_shape != (H, HEAD_DIM) and bias_shape != (H * HEAD_DIM,))
        or dt_bias.dtype is not _FP32
        or dt_bias.get_device() != device
        or not dt_bias.is_contiguous()
    ):
        _bad_dt_bias(dt_bias, q)
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

    # States: contiguous [N, H, V, K], 16-byte aligned, each fp32 or bf16.
    initial_at = final_at = 0
    initial_is_fp32 = final_is_fp32 = False
    state_shape = (N, H, HEAD_DIM, HEAD_DIM)
    if initial_state is not None:
        dtype = initial_state.dtype
        initial_is_fp32 = dtype is _FP32
        initial_at = initial_state.data_ptr()
        if (
            initial_state.shape != state_shape
            or not (initial_is_fp32 or dtype is _BF16)
            or initial_state.get_device() != device
            or not initial_state.is_contiguous()
            or initial_at & (ALIGN_BYTES - 1)
        ):
            _bad_state("initial_state", initial_state, N, q, cu_seqlens)
    if final_state is not None:
        dtype = final_state.dtype
        final_is_fp32 = dtype is _FP32
        final_at = final_state.data_ptr()
        if (
            final_state.shape != state_shape
            or not (final_is_fp32 or dtype is _BF16)
            or final_state.get_device() != device
            or not final_state.is_contiguous()
            or final_at & (ALIGN_BYTES - 1)
        ):
            _bad_state("final_state", final_state, N, q, cu_seqlens)

    if type(scale) is not float:
        scale = _number("scale", scale, "128 ** -0.5")
    if not -_FP32_MAX <= scale <= _FP32_MAX:
        raise ValueError(f"scale: expected a number that is finite in fp32 (usually 128 ** -0.5), got {scale}")
    if type(lower_bound) is not float:
        lower_bound = _number("lower_bound", lower_bound, "-5.0")
    if not LOWEST_BOUND <= lower_bound < 0.0:
        _bad_lower_bound(lower_bound)

    if (
        0 in at
        or not (beta_at and A_log_at and dt_bias_at)
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
        elements = N * H * HEAD_DIM * HEAD_DIM
        final_bytes = 0 if final_state is None else elements * (4 if final_is_fp32 else 2)
        initial_bytes = elements * (4 if initial_is_fp32 else 2)
        if initial_at == final_at and initial_is_fp32 is final_is_fp32:
            initial_bytes = 0
        out_end, final_end = out_at + out_bytes, final_at + final_bytes
        for begin, size in (
            (at[0], q_bytes), (at[1], k_bytes), (at[2], v_bytes), (at[3], g_bytes), (beta_at, beta_bytes),
            (A_log_at, 4 * H), (dt_bias_at, 4 * H * HEAD_DIM), (cu_at, 8 * N + 8 if cu_is_int64 else 4 * N + 4),
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

    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
        or A_log.requires_grad
        or dt_bias.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
        or (out is not None and out.requires_grad)
        or (final_state is not None and final_state.requires_grad)
    ):
        _no_gradient(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            initial_state=initial_state, out=out, final_state=final_state,
        )  # fmt: skip

    return (
        at[0], at[1], at[2], at[3], beta_at, out_at,
        q_strides, k_strides, v_strides, g_strides, beta_strides, out_strides,
        B, T, H, N, A_log_at, dt_bias_at, initial_at, initial_is_fp32, final_at, final_is_fp32,
        cu_at, cu_is_int64, scale, lower_bound,
    )  # fmt: skip


# ---- layouts, carefully


def _row_layout(name: str, tensor: Tensor) -> tuple[tuple[int, int, int], int]:
    """(Batch, token, head) strides of q, k, v, g or out, and the bytes from its first to its last element.

    Raises if the kernel cannot read it.
    """
    if tensor.numel() == 0:
        return (0, 0, 0), 0
    at = tensor.data_ptr()
    *outer, last = tensor.stride()
    if last != 1:
        raise ValueError(
            f"{name}: expected a dense last dimension (stride 1), got strides {tuple(tensor.stride())} "
            f"for shape {list(tensor.shape)}. The usual cause is a transpose of the last dimension; pass {name}.contiguous()."
        )
    # A dimension of size 1 is never stepped along: its stride means nothing.
    b, t, h = (0 if size == 1 else stride for size, stride in zip(tensor.shape, outer))
    if (b | t | h) % ALIGN_ELEMENTS:
        raise ValueError(
            f"{name}: expected batch, token and head strides that are multiples of {ALIGN_ELEMENTS} elements, "
            f"got {tuple(outer)} for shape {list(tensor.shape)}. A slice of a fused projection has them "
            f"if the projection's width is a multiple of {ALIGN_ELEMENTS}; pad it, or pass {name}.contiguous()."
        )
    if at % ALIGN_BYTES:
        raise ValueError(
            f"{name}: expected an address that is a multiple of {ALIGN_BYTES} bytes, got {at:#x} (storage offset "
            f"{tensor.storage_offset()} elements). Slice a fused projection at multiples of {ALIGN_ELEMENTS} elements, "
            f"or pass {name}.contiguous()."
        )
    B, T, H, _ = tensor.shape
    return (b, t, h), 2 * ((B - 1) * b + (T - 1) * t + (H - 1) * h + HEAD_DIM)


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
        same = other.data_ptr() == tensor.data_ptr() and other.dtype is tensor.dtype
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
    optional = ("out", "initial_state", "final_state", "cu_seqlens")
    name, value = next(
        (name, value)
        for name, value in arguments.items()
        if not isinstance(value, Tensor) and not (value is None and name in optional)
    )
    hint = ""
    if name == "cu_seqlens" and isinstance(value, (list, tuple)):
        hint = "; pass torch.tensor(cu_seqlens, dtype=torch.int64, device=q.device)"
    elif name == "final_state" and isinstance(value, bool):
        hint = "; the final state is written in place, so pass a tensor [N, H, V, K] to receive it, or None"
    elif name in ("A_log", "dt_bias") and value is None:
        hint = f"; pass torch.zeros for a gate without {name}"
    raise TypeError(
        f"{name}: expected a torch.Tensor{' or None' if name in optional else ''}, got {type(value).__name__}{hint}"
    )


def _check_all_on_cpu(**arguments: Tensor | None) -> None:
    q = arguments["q"]
    assert q is not None
    if q.device.type != "cpu":
        raise ValueError(f"q: expected a CUDA or CPU tensor, got one on {q.device}")
    for name, tensor in arguments.items():
        if tensor is not None and tensor.device != q.device:
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
        hint = "; the unbounded (softplus) gate is not supported" if name == "lower_bound" and value is None else ""
        raise TypeError(f"{name}: expected a Python number (usually {usual}), got {type(value).__name__}{hint}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number (usually {usual}), got one that overflows fp64") from None


_TRANSPOSED = (
    "The usual mistake is [B, H, T, D]: tokens come before heads here; pass x.transpose(1, 2) for q, k, v, g and out."
)


def _heads_before_tokens(q: Tensor, A_log: Tensor) -> bool:
    """Whether q looks like [B, H, T, D]: A_log has one entry a head, and as many as q's second dimension."""
    return bool(A_log.numel() == q.shape[1] != q.shape[2])


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


def _bad_rows(name: str, tensor: Tensor, q: Tensor, A_log: Tensor) -> NoReturn:
    if tensor.shape != q.shape:
        message = f"{name}: expected the shape of q, [B, T, H, {HEAD_DIM}] = {list(q.shape)}, got {list(tensor.shape)}."
        if tensor.dim() == 4 and tensor.shape == q.transpose(1, 2).shape:
            message += f" {_TRANSPOSED}"
        elif tensor.dim() == 4 and tensor.shape[:2] == q.shape[:2] and tensor.shape[3] == HEAD_DIM:
            message += " As many value heads as query heads are needed: repeat q and k to the number of value heads."
        elif tensor.dim() == 4 and tensor.shape[:3] == q.shape[:3]:
            message += f" Only head dimension {HEAD_DIM} is supported, for keys and values alike."
        elif name == "g" and tensor.shape == q.shape[:3]:
            message += " The gate of Kimi Delta Attention has one value per channel, not one per head."
        elif tensor.dim() == 3 and tensor.numel() == q.numel():
            message += f" Split the projection into heads: {name}.view({', '.join(map(str, q.shape))})."
        elif _heads_before_tokens(q, A_log):
            message += f" q looks like [B, H, T, D] (A_log has {q.shape[1]} heads). {_TRANSPOSED}"
        raise ValueError(message)
    if tensor.dtype is not _BF16:
        _bad_dtype(name, tensor, "bfloat16")
    _bad_device(name, tensor, q.device)


def _bad_beta(beta: Tensor, q: Tensor, A_log: Tensor) -> NoReturn:
    B, T, H, _ = q.shape
    if beta.shape != (B, T, H):
        message = f"beta: expected [B, T, H] = {[B, T, H]} to fit q {list(q.shape)}, got {list(beta.shape)}."
        if list(beta.shape) == [B, T, H, 1]:
            message += " Pass beta.squeeze(-1)."
        elif beta.shape == q.shape:
            message += " There is one beta per token and head, not one per channel."
        elif _heads_before_tokens(q, A_log):
            message += f" q looks like [B, H, T, D] (A_log has {q.shape[1]} heads). {_TRANSPOSED}"
        elif list(beta.shape) == [B, H, T]:
            message += " The usual mistake is [B, H, T]; pass beta.transpose(1, 2)."
        raise ValueError(message)
    if beta.dtype is not _BF16:
        _bad_dtype("beta", beta, "bfloat16")
    _bad_device("beta", beta, q.device)


def _bad_A_log(A_log: Tensor, q: Tensor) -> NoReturn:
    H = q.shape[2]
    if A_log.shape != (H,):
        message = f"A_log: expected [H] = [{H}] to fit q {list(q.shape)}, got {list(A_log.shape)}."
        if A_log.numel() == H:
            message += " Pass A_log.view(-1)."
        elif _heads_before_tokens(q, A_log):
            message += f" q, k, v, g and beta look as if heads came first. {_TRANSPOSED} beta is [B, T, H]."
        raise ValueError(message)
    _bad_parameter("A_log", A_log, q.device)


def _bad_dt_bias(dt_bias: Tensor, q: Tensor) -> NoReturn:
    H = q.shape[2]
    if list(dt_bias.shape) not in ([H, HEAD_DIM], [H * HEAD_DIM]):
        message = (
            f"dt_bias: expected {[H, HEAD_DIM]} or [{H * HEAD_DIM}] ([H, K] or [H * K]), got {list(dt_bias.shape)}."
        )
        if dt_bias.numel() == H * HEAD_DIM:
            message += f" Pass dt_bias.view({H}, {HEAD_DIM}) if heads come first in it."
        elif list(dt_bias.shape) == [H]:
            message += f" There is one bias per head and channel: pass dt_bias.unsqueeze(1).expand({H}, {HEAD_DIM}).contiguous()."
        elif list(dt_bias.shape) == [HEAD_DIM]:
            message += f" There is one bias per head and channel: pass dt_bias.expand({H}, {HEAD_DIM}).contiguous()."
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


def _bad_state(name: str, tensor: Tensor, N: int, q: Tensor, cu_seqlens: Tensor | None) -> NoReturn:
    H = q.shape[2]
    if tensor.shape != (N, H, HEAD_DIM, HEAD_DIM):
        source = "B" if cu_seqlens is None else "len(cu_seqlens) - 1"
        message = (
            f"{name}: expected [N, H, V, K] = {[N, H, HEAD_DIM, HEAD_DIM]} with N = {source}, got {list(tensor.shape)}."
        )
        if tensor.dim() == 3 and N == 1:
            message += f" Pass {name}.unsqueeze(0)."
        elif tensor.dim() == 4 and tensor.shape[0] != N and cu_seqlens is not None:
            message += " There is one state per sequence, empty ones included."
        raise ValueError(message)
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        _bad_dtype(name, tensor, "float32 or bfloat16")
    if tensor.device != q.device:
        _bad_device(name, tensor, q.device)
    if not tensor.is_contiguous():
        _not_contiguous(name, tensor)
    raise ValueError(
        f"{name}: expected an address that is a multiple of {ALIGN_BYTES} bytes, got {tensor.data_ptr():#x} "
        f"(storage offset {tensor.storage_offset()} elements); pass a tensor of its own"
    )


def _bad_dtype(name: str, tensor: Tensor, expected: str) -> NoReturn:
    hint = ""
    if name in ("out", "initial_state", "final_state"):
        pass
    elif expected == "bfloat16":
        hint = f"; pass {name}.to(torch.bfloat16)"
        if name in ("g", "beta"):
            hint += " (raw values: the activation happens inside)"
    elif expected == "float32":
        hint = f"; pass {name}.float()"
    elif name == "cu_seqlens":
        hint = "; pass cu_seqlens.to(torch.int32)"
    raise TypeError(f"{name}: expected {expected}, got {_name(tensor.dtype)} {list(tensor.shape)}{hint}")


def _bad_device(name: str, tensor: Tensor, device: torch.device) -> NoReturn:
    raise ValueError(f"{name}: expected it on {device} like q, got {tensor.device}; pass {name}.to(q.device)")


def _not_contiguous(name: str, tensor: Tensor) -> NoReturn:
    cure = "pass a contiguous tensor to write into" if name == "final_state" else f"pass {name}.contiguous()"
    raise ValueError(
        f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())} for shape {list(tensor.shape)}; {cure}"
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


def _no_gradient(**arguments: Tensor | None) -> NoReturn:
    name = next(name for name, tensor in arguments.items() if tensor is not None and tensor.requires_grad)
    raise RuntimeError(
        f"{name} requires a gradient, and flash_kda.fwd computes none (forward only). "
        f"Call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()."
    )
