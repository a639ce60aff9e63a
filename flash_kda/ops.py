"""``torch.ops.flash_kda.fwd``: the call as a registered operator, for whatever traces a program instead of running it.

torch.compile, torch.export and FakeTensor see one operator that writes into its results and returns nothing; when the program
runs, it is checked and launched as any other call. Eager calls do not pass through it: ``is_traced`` is all that they pay. A
program that was exported or compiled elsewhere needs ``import flash_kda.ops`` before it is loaded.

The first sixteen arguments are those of the operator that vLLM calls, in its order (see ``flash_kda.vllm``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from flash_kda.checks import refuse_gradient, refuse_tangents

__all__ = ["SCHEMA", "is_traced", "provide", "trace"]

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor(b!)? workspace, "
    "Tensor? A_log, Tensor? dt_bias, float? lower_bound, Tensor? initial_state=None, Tensor(c!)? final_state=None, "
    "Tensor? cu_seqlens=None, Tensor(d!)? checkpoint_states=None, Tensor? checkpoint_offsets=None, *, "
    "bool use_qk_l2norm_in_kernel=True, bool use_gate_in_kernel=True, bool use_beta_sigmoid_in_kernel=True, "
    "bool allow_neg_eigval=False, bool state_v_first=True, Tensor? state_indices=None, "
    "Tensor(e!)? intermediate_states=None, Tensor? cu_seqlens_cpu=None, bool batch_invariant=False) -> ()"
)

# The kernels read strides as they are: a compiler must hand over tensors laid out as in the program that it compiled.
_EXACT_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("flash_kda", "DEF")
_library.define("fwd" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag, _EXACT_STRIDES))
_library.define("get_workspace_size(int T_total, int H, int N=1) -> int")

_ARGUMENTS = tuple(argument.name for argument in torch.ops.flash_kda.fwd.default._schema.arguments)

# Whether this thread is inside the operator: then a call is real, whatever traces around it.
_thread = threading.local()


def provide(fwd: Callable[..., Any], get_workspace_size: Callable[..., int]) -> None:
    """Register what the operators run on real tensors. Called once, by the module that defines these functions."""

    def run(*arguments: Any, **options: Any) -> None:
        _thread.running = True
        try:
            fwd(**dict(zip(_ARGUMENTS, arguments)), **options)
        finally:
            _thread.running = False

    for key in ("CPU", "CUDA"):
        _library.impl("fwd", run, key)
    _library.impl("get_workspace_size", get_workspace_size, "CompositeExplicitAutograd")


def _without_gradient(*arguments: Any, **options: Any) -> None:
    named = {**dict(zip(_ARGUMENTS, arguments)), **options}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    refuse_gradient(**tensors)
    refuse_tangents(**tensors)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.flash_kda.fwd.default(*arguments, **options)


_library.impl("fwd", _without_gradient, "Autograd")


# Nothing is returned; what is wrong with the arguments is said when the program runs.
torch.library.register_fake("flash_kda::fwd", lambda *arguments, **options: None, lib=_library)


# Looked up by name since they are private to torch; without them, tracers other than torch.compile see no operator.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)
_transforms: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def is_traced(q: Tensor) -> bool:
    """Whether a call with this ``q`` is to be recorded rather than run: a FakeTensor, or any under torch.compile, torch.export, a
    dispatch mode or a functorch transform."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return bool(
        (
            _dispatch_modes()
            or _transforms() is not None
            or (type(q) is not Tensor and isinstance(q, FakeTensor))
            or torch.compiler.is_compiling()
        )
        and not getattr(_thread, "running", False)
    )


def trace(
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
    *,
    checkpoint_states: Tensor | None,
    checkpoint_offsets: Tensor | None,
    workspace: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``fwd``, with its arguments and results, through the operator."""
    if out is None:
        out = v.new_empty(v.shape, dtype=torch.bfloat16)
    torch.ops.flash_kda.fwd(
        q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens,
        checkpoint_states, checkpoint_offsets, **options,
    )  # fmt: skip
    return out, final_state


# Calls ``provide``. Here for whoever imports this module alone, to load a program that was exported elsewhere.
import flash_kda.forward  # noqa: E402, F401
