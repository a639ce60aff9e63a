"""vLLM: its KDA layers call an operator of their own build, ``torch.ops._flashkda_C.fwd``; ``register()`` puts this package in its place.

vLLM runs models in worker processes, so the call has to happen in each of them: set FLASH_KDA_VLLM=1, and the plugin that this
package declares (entry point ``vllm.general_plugins``) registers wherever vLLM starts. The layers are taken as they are, with
``--additional-config '{"kda_prefill_backend": "flashkda"}'`` where they do not choose the operator by themselves.

The operator has vLLM's sixteen positional arguments and writes its results in place: q, k, v, g, beta, scale, out, workspace, A_log,
dt_bias, lower_bound, initial_state, final_state, cu_seqlens, checkpoint_state, checkpoint_offsets, as ``flash_kda.fwd`` describes
them. ``torch.ops.flash_kda.fwd`` takes the same sixteen, and all options of ``fwd`` by keyword.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from flash_kda.ops import SCHEMA

__all__ = ["plugin", "register"]

NAMESPACE = "_flashkda_C"
MODULE = f"vllm.{NAMESPACE}"  # what vLLM imports before it calls the operator

_library: torch.library.Library | None = None


def register() -> None:
    """Define ``torch.ops._flashkda_C.fwd`` and ``get_workspace_size`` for vLLM, in this process. A second call does nothing.

    Raises:
        RuntimeError: if vLLM's own operator is loaded already.
    """
    global _library
    if _library is not None:
        return
    if hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        raise RuntimeError(
            f"flash_kda.vllm.register: expected to come before vLLM loads its own {MODULE}, but torch.ops.{NAMESPACE}.fwd is "
            "defined already; start vLLM with FLASH_KDA_VLLM=1 in the environment instead"
        )
    positional, _ = SCHEMA.split(", *,")
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define(f"fwd{positional}, Tensor? checkpoint_indptr=None) -> ()")
    library.define("get_workspace_size(int T_total, int H, int N=1) -> int")
    library.impl("fwd", _fwd, "CompositeImplicitAutograd")  # tracers and autograd see torch.ops.flash_kda.fwd
    library.impl("get_workspace_size", torch.ops.flash_kda.get_workspace_size, "CompositeExplicitAutograd")
    sys.modules[MODULE] = ModuleType(MODULE, "The operator of flash_kda, in the place of vLLM's own.")
    _library = library


def plugin() -> None:
    """``register()`` if FLASH_KDA_VLLM=1; vLLM calls it in each of its processes."""
    if os.environ.get("FLASH_KDA_VLLM") == "1":
        register()


def _fwd(*arguments: Any) -> None:
    if arguments[16:] not in ((), (None,)):
        raise ValueError(
            "checkpoint_indptr: expected None, got a tensor; flash_kda writes one or two checkpoints a sequence, "
            "with offsets [N] or [N, 2]"
        )
    torch.ops.flash_kda.fwd(*arguments[:16])
