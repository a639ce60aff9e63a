"""A backend for flash-linear-attention: ``flash_kda.fla.register()`` once, and FLA's ``chunk_kda`` runs here wherever it can.

FLA (0.5 and 0.6) brings a backend that finds this package by itself, but lets only one form of the call through. This one takes the
whole forward of ``chunk_kda`` that ``flash_kda.fwd`` serves: grouped value heads, both gates and precomputed decays, K-first
states, negative eigenvalues, absent A_log and dt_bias, intermediate states, fp32 gates. It declines the rest with a reason, and
FLA goes on to its other backends and its Triton kernels. FLA_FLASH_KDA=0 in the environment switches it off, at any time.

``counts`` tells what became of the calls, ``why_not`` what would become of one, and FLA's logger (at INFO) which backend ran.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash_kda
from flash_kda import device_code
from flash_kda.checks import SNAPSHOT_TOKENS, check

__all__ = ["chunk_kda", "counts", "register", "why_not"]

BACKEND = "flash_kda.fla"  # the name in FLA's log

counts: Counter[str] = Counter()
"""Calls of ``chunk_kda`` since ``register()``: "served", and each reason to decline."""


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """FLA's ``chunk_kda``, forward only, through ``flash_kda.fwd``; needs no FLA. Arguments and defaults are those of FLA 0.6.

    Args:
        q, k: bf16 ``[B, T, H, 128]``.
        v: bf16 ``[B, T, HV, 128]``, HV a multiple of H.
        g: bf16 or fp32 ``[B, T, HV, 128]``: the log-decay, or with use_gate_in_kernel the raw gate.
        beta: bf16 or fp32 ``[B, T, HV]``: activated, or with use_beta_sigmoid_in_kernel logits.
        scale: None means ``128 ** -0.5``.
        initial_state: fp32 ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first.
        return_intermediate_states: also return the states before tokens 0, 64, 128, ... of each sequence. With cu_seqlens their
            number is read from cu_seqlens_cpu or, without it, from the GPU, which waits.
        safe_gate, disable_recompute: how FLA's kernels compute; without effect here.
        options: A_log ``[HV]`` and dt_bias ``[HV * 128]``, fp32, for use_gate_in_kernel; chunk_size; what else FLA knows.

    Returns:
        ``(out, final_state)`` and, if asked for, intermediate states, bf16 ``[B, chunks, HV, K, V]`` (V-first likewise).
        ``final_state`` is fp32, None unless output_final_state.

    Raises:
        NotImplementedError: for what ``why_not`` names.
    """
    arguments = {name: value for name, value in locals().items() if name != "options"}
    try:
        call, rows = _translate(**arguments, **options)
    except _DeclinedError as declined:
        raise NotImplementedError(f"flash_kda.fla.chunk_kda: {declined}") from None

    layout = (v.shape[2], v.shape[3], q.shape[3]) if call["state_v_first"] else (v.shape[2], q.shape[3], v.shape[3])
    final_state = intermediate = None
    if output_final_state:
        N = q.shape[0] if call["cu_seqlens"] is None else call["cu_seqlens"].shape[0] - 1
        final_state = torch.empty(N, *layout, dtype=torch.float32, device=q.device)
    if return_intermediate_states:
        intermediate = torch.empty(rows, *layout, dtype=q.dtype, device=q.device)
    out, _ = flash_kda.fwd(**call, out=None, final_state=final_state, intermediate_states=intermediate)
    if intermediate is None:
        return out, final_state
    return out, final_state, intermediate.unflatten(0, (q.shape[0], -1))


def why_not(**arguments: Any) -> str | None:
    """Why this backend declines ``chunk_kda`` with these arguments, given by name; None if it takes them."""
    try:
        _translate(**arguments)
    except _DeclinedError as declined:
        return str(declined)
    return None


def register() -> None:
    """Make this backend the first that FLA's ``chunk_kda`` asks. Once a process; a second call does nothing.

    FLA 0.5.1 and 0.5.2 lose their choice of backends under a torch that unwraps what ``torch.compiler.disable`` has wrapped twice:
    ``chunk_kda`` then runs Triton whatever is installed. If so, ``chunk_kda`` is wrapped anew and replaced in every module that
    has imported it by name.

    Raises:
        ImportError: if FLA is not installed, or not with a ``chunk_kda`` that has backends (0.5.0 and later).
        RuntimeError: if FLA_DISABLE_BACKEND_DISPATCH=1 switches all of FLA's backends off.
    """
    global _registered
    if _registered:
        return
    try:
        from fla.ops.kda import chunk_kda as entry

        base, add = _registry(entry)
    except ImportError as error:
        raise ImportError(
            f"flash_kda.fla.register: expected flash-linear-attention 0.5.0 or later, got: {error}; pip install -U flash-linear-attention"
        ) from error
    if sys.modules[base.__module__]._DISPATCH_DISABLED:
        raise RuntimeError(
            "flash_kda.fla.register: expected FLA's backends to be on, got FLA_DISABLE_BACKEND_DISPATCH=1 in the environment; unset it"
        )
    add(_backend(base, tuple(inspect.signature(entry).parameters)))
    _registered = True


_registered = False


class _DeclinedError(Exception):
    """The reason why a call is not ours."""


def _translate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool = False,
    **unknown: Any,
) -> tuple[dict[str, Any], int]:
    """What ``fwd`` is to be called with, but for the results; and the number of intermediate states, 0 if none are asked for."""
    if unknown:
        raise _DeclinedError(f"unknown options {', '.join(sorted(unknown))}")
    if cp_context is not None:
        raise _DeclinedError("context parallelism (cp_context) is not served")
    if chunk_size != SNAPSHOT_TOKENS and return_intermediate_states:
        raise _DeclinedError(f"intermediate states lie {SNAPSHOT_TOKENS} tokens apart, not chunk_size={chunk_size}")
    if use_gate_in_kernel and lower_bound is None and (safe_gate or A_log is None):
        raise _DeclinedError("lower_bound is missing: FLA demands it for safe_gate=True, and where there is no A_log")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise _DeclinedError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if initial_state is not None and initial_state.dtype is not torch.float32:
        raise _DeclinedError(f"initial_state must be float32, got {initial_state.dtype}")
    if q.device.type == "cuda" and (reason := _why_no_kernel(q.get_device())) is not None:
        raise _DeclinedError(reason)

    gated = use_gate_in_kernel
    call = {
        "q": _dense(q), "k": _dense(k), "v": _dense(v), "g": _dense(g), "beta": beta,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "A_log": A_log.reshape(-1) if gated and A_log is not None else None,
        "dt_bias": dt_bias.reshape(-1) if gated and dt_bias is not None else None,
        "lower_bound": lower_bound if gated else None,
        "initial_state": None if initial_state is None else initial_state.contiguous(),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "cu_seqlens_cpu": None if cu_seqlens is None else cu_seqlens_cpu,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": gated,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first or transpose_state_layout,
    }  # fmt: skip
    try:
        check(**call, out=None, final_state=None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _DeclinedError(str(error)) from None

    if not return_intermediate_states:
        return call, 0
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return call, B * -(-T // chunk_size)
    if use_graph:  # as many as any lengths can give
        return call, -(-T // chunk_size) + cu_seqlens.shape[0] - 2
    offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    return call, sum(-(-(end - begin) // chunk_size) for begin, end in zip(offsets, offsets[1:]))


@functools.cache
def _why_no_kernel(device: int) -> str | None:
    kernel, _, reason = device_code.choose(device)
    return reason if kernel is None else None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _backend(base: type, names: tuple[str, ...]) -> type:
    """The class that FLA registers. ``names``: parameters of FLA's function, for what is passed by position."""

    class Backend(base):  # type: ignore[misc]
        """chunk_kda through ``flash_kda.fwd``."""

        backend_type = BACKEND
        package_name = "flash_kda"
        env_var = "FLA_FLASH_KDA"
        default_enable = True
        priority = 2  # before FLA's own backend for this package, which is 3 and overlooks allow_neg_eigval in 0.5

        def chunk_kda_verifier(self, *arguments: Any, **options: Any) -> tuple[bool, str | None]:
            reason = why_not(**dict(zip(names, arguments)), **options)
            if reason is not None:
                counts[reason if reason in counts or len(counts) < 100 else "other reasons"] += 1
            return reason is None, reason

        def chunk_kda(self, *arguments: Any, **options: Any) -> Any:
            result = chunk_kda(**dict(zip(names, arguments)), **options)
            counts["served"] += 1
            return result

    return Backend


def _registry(entry: Callable[..., Any]) -> tuple[type, Callable[[type], Any]]:
    """FLA's base class of backends, and what adds one to ``chunk_kda``, in the installed version."""
    try:
        from fla.backends import BaseBackend, register  # 0.6
    except ImportError:
        from fla.ops.backends import BaseBackend  # 0.5
        from fla.ops.kda.backends import kda_registry

        def add(backend: type) -> None:
            kda_registry.register(backend())
            _restore_dispatch(entry, BaseBackend, kda_registry)

        return BaseBackend, add
    return BaseBackend, register(entry)


def _restore_dispatch(entry: Callable[..., Any], base: type, registry: Any) -> None:
    """Wrap ``chunk_kda`` of FLA 0.5 anew if it does not ask its registry."""

    class AskedError(Exception):
        pass

    class Probe(base):  # type: ignore[misc]
        backend_type = "probe"
        priority = -1

        def verify(self, *_: Any, **__: Any) -> Any:
            raise AskedError

    registry.register(Probe())
    try:
        entry()  # asks the registry first, else fails for want of arguments
    except AskedError:
        return
    except TypeError:
        pass
    finally:
        del registry._backends[Probe.backend_type]

    from fla.ops.kda.backends import dispatch

    dispatching = dispatch("kda")(inspect.unwrap(entry))
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("chunk_kda") is entry:
            module.chunk_kda = dispatching  # type: ignore[attr-defined]
