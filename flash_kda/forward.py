"""``fwd``: the call, from arguments to launch."""

from __future__ import annotations

import warnings
from typing import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_kda import device_code, ops, reference
from flash_kda.checks import (
    OFFSETS,
    OUT,
    SEQUENCES,
    TOKENS,
    VALUE_HEADS,
    WHOLE,
    Call,
    check,
    check_workspace,
    keep_whole,
    refuse_tangents,
)

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
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
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
    enable_cp: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Forward of Kimi Delta Attention over whole sequences. Results are written in place into ``out`` and ``final_state``.

    What is computed, per head and token, is written at the top of ``flash_kda.reference``. On a GPU the call launches on the
    tensors' device, on torch's current stream there, and returns at once: it never waits for the GPU, allocates nothing but an
    ``out`` and a workspace (``get_workspace_size``) that were not given, and can be captured in a CUDA graph. Where sequences
    times heads would leave most of the GPU idle, a long sequence (one, or the rows of a batch) is cut into segments whose
    states are chained exactly, and where the gates prove to forget a state within 48 tokens, what follows a cut does not wait
    for it; that changes results by rounding alone, and ``batch_invariant`` or FLASH_KDA_SPLIT=0 in the environment prevents
    it. On CPU tensors the call runs the reference (slow; warns once).

    Args:
        q, k: bf16 ``[B, T, H, 128]``, raw; L2-normalised inside.
        v: bf16 ``[B, T, HV, 128]``. HV is a multiple of H; value head ``h`` uses query and key head ``h // (HV // H)``.
        g: bf16 or fp32 ``[B, T, HV, 128]``, raw gate; the log-decay is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        beta: bf16 or fp32 ``[B, T, HV]``, logits; the sigmoid is applied inside. Any strides.
        scale: factor on the output, usually ``128 ** -0.5``.
        out: bf16 ``[B, T, HV, 128]`` to write into, or None to allocate. Rows that belong to no sequence stay untouched (so in
            an ``out`` that was allocated here they hold nothing meaningful).
        A_log: fp32 ``[HV]``, contiguous; None: the factor ``exp(A_log)`` is 1.
        dt_bias: fp32 ``[HV, 128]`` or ``[HV * 128]``, contiguous; None: zero.
        lower_bound: log-decay per token of a fully open gate, in [-5, 0). None: the gate without a bound, whose log-decay is
            ``-exp(A_log) * softplus(g + dt_bias)``.
        initial_state: fp32 or bf16 ``[N, HV, V, K]``, 16-byte aligned, dense but for the first dimension; None means zero.
        final_state: fp32 or bf16 ``[N, HV, V, K]``, likewise, to write the final states into; None: they are not returned.
            Its dtype need not be that of ``initial_state``. May be the very same tensor as ``initial_state``.
        cu_seqlens: int32 or int64 ``[N + 1]``, contiguous, on the same device: offsets of N sequences laid end to end, any of
            which may be empty; needs ``B == 1``. None: N = B sequences of length T. Values are not read on the host: offsets are
            clamped into [0, T], and a sequence that ends before it begins counts as empty.
        use_qk_l2norm_in_kernel: False: q and k are taken as they are.
        use_gate_in_kernel: False: g is the natural-log decay itself (values above 0 count as 0); A_log, dt_bias and lower_bound
            must be None.
        use_beta_sigmoid_in_kernel: False: beta is taken as it is.
        allow_neg_eigval: True: beta, activated or taken, is doubled, which admits eigenvalues down to -1.
        state_v_first: False: all states are ``[..., K, V]``.
        state_indices: int32 or int64 ``[N]``, contiguous, on the same device: initial_state and final_state are pools
            ``[rows, HV, V, K]``, and sequence n reads and writes row ``state_indices[n]``. An index that is negative or beyond the
            pool reads zero and writes nothing. Indices must differ if there is a final_state: on the CPU others are refused, on a
            GPU the results of the sequences that share a row are not defined.
        intermediate_states: fp32 or bf16 ``[rows, HV, V, K]``, contiguous, 16-byte aligned; written: for each sequence in turn
            the states before its tokens 0, 64, 128, ..., ``ceil(length / 64)`` rows. What does not fit is not written; rows
            beyond stay untouched.
        checkpoint_states: fp32 or bf16 ``[N, HV, V, K]`` or ``[N, 2, HV, V, K]``, contiguous, 16-byte aligned; written: the
            states after ``checkpoint_offsets`` tokens.
        checkpoint_offsets: int32 or int64 ``[N]`` or ``[N, 2]``, contiguous, on the same device: tokens from the sequence's
            start, a multiple of 16. 0, any other number and one beyond the sequence leave the row untouched. The state is, bit for
            bit, the final state of a ``batch_invariant`` call on so many tokens.
        workspace: uint8, contiguous, 16-byte aligned, at least ``get_workspace_size`` bytes; None: allocated if needed.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, if there is one: what it holds is checked before the launch.
        batch_invariant: True: no sequence is cut into segments, so that its results do not depend, bit for bit, on what else
            is in the batch. Calls that ask for intermediate states or checkpoints are never cut.
        enable_cp: the opposite of batch_invariant, by sglang's name for it. True: sequences may be cut, which is the default.

        q, k, v, g and out may be slices of larger tensors: the last dimension is dense, the others may have any strides. They
            are read in place; fastest where strides are multiples of 8 elements and addresses of 16 bytes. No tensor that is
            written may overlap another one, except as said.

    Returns:
        ``(out, final_state)``: the tensors written; ``final_state`` is None if none was given.

    Raises:
        TypeError: an argument is not a tensor, a number or a bool, or has a dtype that is not listed.
        ValueError: a shape, layout, device or range is not as listed, arguments contradict one another, or memory overlaps.
        RuntimeError: a gradient would be needed, or there is no kernel for this device (the message says why).
            Whatever is raised, nothing was launched and nothing written.
    """
    if enable_cp is not None:
        batch_invariant = keep_whole(batch_invariant, enable_cp)
    if ops.is_traced(q):
        return ops.trace(
            q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first, state_indices=state_indices, intermediate_states=intermediate_states,
            checkpoint_states=checkpoint_states, checkpoint_offsets=checkpoint_offsets, workspace=workspace,
            cu_seqlens_cpu=cu_seqlens_cpu, batch_invariant=batch_invariant,
        )  # fmt: skip
    if forward_ad._current_level >= 0:
        refuse_tangents(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, out=out,
            final_state=final_state, intermediate_states=intermediate_states, checkpoint_states=checkpoint_states,
        )  # fmt: skip
    # Most calls are checked and launched in C++, which is silent about those that it does not take.
    usual = (q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
    if (
        _quick is not None
        and out is not None
        and use_qk_l2norm_in_kernel is True
        and use_gate_in_kernel is True
        and use_beta_sigmoid_in_kernel is True
        and allow_neg_eigval is False
        and state_v_first is True
        and state_indices is None
        and intermediate_states is None
        and checkpoint_states is None
        and checkpoint_offsets is None
        and workspace is None
        and cu_seqlens_cpu is None
        and batch_invariant is False
        and _quick(*usual, torch.is_grad_enabled())
    ):
        return out, final_state
    call = check(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        state_indices, intermediate_states, checkpoint_states, checkpoint_offsets, workspace, cu_seqlens_cpu, batch_invariant,
    )  # fmt: skip

    if not q.is_cuda:
        _warn_cpu()
        if out is None:
            out = torch.empty(v.shape, dtype=torch.bfloat16, device=q.device)  # not the default device
        reference.write_chunked(
            out,
            reference.States(
                initial_state, final_state, state_v_first, state_indices, intermediate_states, checkpoint_states, checkpoint_offsets
            ),
            q, k, v, g, beta, float(scale), A_log, dt_bias, None if lower_bound is None else float(lower_bound), cu_seqlens,
            reference.Options(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        )  # fmt: skip
        return out, final_state

    launch, _ = _native or _load_native()
    device = q.get_device()
    size = needed_workspace(call, device)
    if workspace is not None:
        check_workspace(workspace, size)
    if out is None:
        out = torch.empty(v.shape, dtype=torch.bfloat16, device=q.device)
        call = (*call[:OUT], out.data_ptr(), *call[OUT + 1 :])
    if size:
        # Held until the launch has returned: from then on, whoever is given the memory next on this stream comes after the kernels.
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        launch(device, _current_stream(device), *call, workspace.data_ptr(), size)
    else:
        launch(device, _current_stream(device), *call, 0, 0)
    return out, final_state


def needed_workspace(call: Call, device: int) -> int:
    """Bytes of scratch memory that a call takes on a GPU."""
    _, workspace_size = _native or _load_native()
    return workspace_size(device, call[TOKENS], call[VALUE_HEADS], call[SEQUENCES], call[OFFSETS] != 0, call[WHOLE])


def segments(call: Call, device: int) -> int:
    """Into how many segments a call cuts each of its sequences on a GPU; 1: it does not."""
    count: int = device_code.native().segments(
        device, call[TOKENS], call[VALUE_HEADS], call[SEQUENCES], call[OFFSETS] != 0, call[WHOLE]
    )
    return count


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of scratch memory that ``fwd`` takes for a call over ``T_total`` tokens, ``H`` value heads and ``N`` sequences.

    ``fwd`` allocates them itself, from torch's allocator, if it is given no ``workspace``. They hold states on their way from one
    block of the GPU to another: between segments, where few long sequences are cut into them (see ``fwd``), and where the work of
    many tokens is shared out evenly among the multiprocessors (at most 9 MB on an H200). Short calls need none. The answer is for
    the current CUDA device, and enough for N rows of a batch as well as for N sequences in ``cu_seqlens``. 0 where no kernel can run.

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
    rows = workspace_size(device, -(-T_total // N), H, N, False, False)
    return max(rows, workspace_size(device, T_total, H, N, True, False))


# Bound at the first call: looking the module up costs more than the checks of an argument.
_native: tuple[Callable[..., None], Callable[[int, int, int, int, bool, bool], int]] | None = None


# The short way through the same module, where torch gives tensors to C (2.10 and newer); also bound at the first call.
_quick: Callable[..., bool] | None = None


def _load_native() -> tuple[Callable[..., None], Callable[[int, int, int, int, bool, bool], int]]:
    global _native, _quick
    module = device_code.native()
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is not None and module.quick_setup(Tensor, torch.nn.Parameter, api):
        _quick = module.quick
    _native = (module.forward, module.workspace_size)
    return _native


def _stream_lookup() -> Callable[[int], int]:
    # torch.cuda.current_stream() builds an object and costs 8 us; this private call gives the bare handle in 0.2 us.
    fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is not None:
        return fast
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


_current_stream = _stream_lookup()


def _warn_cpu() -> None:
    global _warned_cpu
    if not _warned_cpu:
        _warned_cpu = True
        warnings.warn(
            "flash_kda.fwd was called with CPU tensors: it runs the plain-torch reference, which is right but slow. "
            "This is said once.",
            stacklevel=3,
        )


ops.provide(fwd, get_workspace_size)
