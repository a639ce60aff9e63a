"""``fwd``: the call, from arguments to launch."""

from __future__ import annotations

import warnings
from typing import Callable

import torch
from torch import Tensor

from flash_kda import device_code, reference
from flash_kda.checks import HEADS, OFFSETS, OUT, SEQUENCES, TOKENS, check

__all__ = ["fwd", "get_workspace_size"]

_warned_cpu = False


def fwd(
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
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Forward of Kimi Delta Attention over whole sequences. Results are written in place into ``out`` and ``final_state``.

    What is computed, per head and token, is written at the top of ``flash_kda.reference``. On a GPU the call launches on the
    tensors' device, on torch's current stream there, and returns at once: it never waits for the GPU, allocates nothing but an
    ``out`` that was not given and the workspace (``get_workspace_size``), and can be captured in a CUDA graph. Where sequences
    times heads would leave most of the GPU idle, a long sequence (one, or the rows of a batch) is cut into segments whose
    states are chained exactly; that changes results by rounding alone, and FLASH_KDA_SPLIT=0 in the environment prevents it.
    On CPU tensors the call runs the reference (slow; warns once).

    Args:
        q, k: bf16 ``[B, T, H, 128]``, raw; L2-normalised inside.
        v: bf16 ``[B, T, H, 128]``.
        g: bf16 ``[B, T, H, 128]``, raw gate; the log-decay is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        beta: bf16 ``[B, T, H]``, logits; the sigmoid is applied inside. Any strides.
        scale: factor on the output, usually ``128 ** -0.5``.
        out: bf16 ``[B, T, H, 128]`` to write into, or None to allocate. Rows that belong to no sequence stay untouched (so in
            an ``out`` that was allocated here they hold nothing meaningful).
        A_log: fp32 ``[H]``, contiguous.
        dt_bias: fp32 ``[H, 128]`` or ``[H * 128]``, contiguous.
        lower_bound: log-decay per token of a fully open gate, in [-5, 0).
        initial_state: fp32 or bf16 ``[N, H, V, K]``, contiguous; None means zero.
        final_state: fp32 or bf16 ``[N, H, V, K]``, contiguous, to write the final states into; None: they are not returned.
            Its dtype need not be that of ``initial_state``. May be the very same tensor as ``initial_state``.
        cu_seqlens: int32 or int64 ``[N + 1]``, contiguous, on the same device: offsets of N sequences laid end to end, any of
            which may be empty; needs ``B == 1``. None: N = B sequences of length T. Values are not read on the host: offsets are
            clamped into [0, T], and a sequence that ends before it begins counts as empty.

        q, k, v, g and out may be slices of larger tensors: the last dimension is dense, the other strides are multiples of 8
        elements, the address is a multiple of 16 bytes. They are read in place. Neither ``out`` nor ``final_state`` may
        overlap an input, except as said.

    Returns:
        ``(out, final_state)``: the tensors written; ``final_state`` is None if none was given.

    Raises:
        TypeError: an argument is not a tensor or not a number, or has a dtype that is not listed.
        ValueError: a shape, layout, device or range is not as listed, or memory overlaps.
        RuntimeError: a gradient would be needed, or there is no kernel for this device (the message says why).
            Whatever is raised, nothing was launched and nothing written.
    """
    call = check(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)

    if not q.is_cuda:
        return _on_cpu(
            q,
            k,
            v,
            g,
            beta,
            float(scale),
            out,
            A_log,
            dt_bias,
            float(lower_bound),
            initial_state,
            final_state,
            cu_seqlens,
        )

    launch, workspace_size = _native or _load_native()
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        call = (*call[:OUT], out.data_ptr(), *call[OUT + 1 :])
    device = q.get_device()
    size = workspace_size(device, call[TOKENS], call[HEADS], call[SEQUENCES], call[OFFSETS] != 0)
    if size:
        # Held until the launch has returned: from then on, whoever is given the memory next on this stream comes after the kernels.
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        launch(device, _current_stream(device), *call, workspace.data_ptr(), size)
    else:
        launch(device, _current_stream(device), *call, 0, 0)
    return out, final_state


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of scratch memory that ``fwd`` takes for a call over ``T_total`` tokens, ``H`` heads and ``N`` sequences.

    ``fwd`` allocates them itself, from torch's allocator. They hold the states between the segments into which few long sequences
    are cut (see ``fwd``); most calls need none. The answer is for the current CUDA device, and for N rows of a batch: N > 1
    sequences in ``cu_seqlens`` are not cut. 0 where no kernel can run.

    Raises:
        ValueError: for a negative count.
    """
    if T_total < 0 or H < 0 or N < 0:
        raise ValueError(f"get_workspace_size: expected counts of at least 0, got T_total={T_total}, H={H}, N={N}")
    if N == 0 or not torch.cuda.is_available():
        return 0
    device = torch.cuda.current_device()
    if device_code.choose(device).kernel is None:
        return 0
    _, workspace_size = _native or _load_native()
    return workspace_size(device, -(-T_total // N), H, N, False)


# Bound at the first call: looking the module up costs more than the checks of an argument.
_native: tuple[Callable[..., None], Callable[[int, int, int, int, bool], int]] | None = None


def _load_native() -> tuple[Callable[..., None], Callable[[int, int, int, int, bool], int]]:
    global _native
    module = device_code.native()
    _native = (module.forward, module.workspace_size)
    return _native


def _stream_lookup() -> Callable[[int], int]:
    # torch.cuda.current_stream() builds an object and costs 8 us; this private call gives the bare handle in 0.2 us.
    fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is not None:
        return fast
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


_current_stream = _stream_lookup()


def _on_cpu(
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
) -> tuple[Tensor, Tensor | None]:
    global _warned_cpu
    if not _warned_cpu:
        _warned_cpu = True
        warnings.warn(
            "flash_kda.fwd was called with CPU tensors: it runs the plain-torch reference, which is right but slow. "
            "This is said once.",
            stacklevel=3,
        )
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)  # not the default device
    reference.write_chunked(
        out, final_state, q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens
    )
    return out, final_state
