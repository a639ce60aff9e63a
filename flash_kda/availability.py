"""What this installation can run, and what a call would do: answers with reasons, never exceptions."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

from flash_kda import device_code

__all__ = ["Availability", "Explanation", "explain", "is_available"]


@dataclass(frozen=True)
class Availability:
    """Truthy if there is a kernel for a device. ``reason`` names it, or says why there is none."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Explanation:
    """What a call of ``fwd`` would do. Truthy if it would run; ``str()`` gives path and reason in one line.

    Attributes:
        path: the kernel, such as "sm90" or "portable-wide"; "reference" for CPU tensors; "traced" where the call would be
            recorded as an operator, not run; "refused".
        segments: whether long sequences are cut into segments that are computed side by side.
        reason: why, in words; for a call that would be refused, the text of its error.
    """

    path: str
    segments: bool
    reason: str

    def __bool__(self) -> bool:
        return self.path != "refused"

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def is_available(device: Any = None) -> Availability:
    """Whether ``flash_kda.fwd`` has a GPU kernel for a device. Never raises.

    Asking starts the CUDA driver in this process, as ``torch.cuda.is_available()`` does, and children that it forks afterwards
    cannot use CUDA: ask in the workers, or spawn them.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or "cuda": torch's current CUDA device, 0 where torch does not use
            CUDA yet.

    Returns:
        An answer that can be used as a bool; its ``reason`` names the kernel, or says why there is none.
    """
    try:
        ordinal = _ordinal(device)
    except Exception as error:
        return Availability(False, f"device: expected an index or a CUDA device, got {device!r}: {error}")
    kernel, cubin, reason = device_code.choose(ordinal)
    if kernel is None or cubin is None:
        return Availability(False, reason)
    return Availability(True, f"{kernel}: {reason}")


def explain(*arguments: Any, **options: Any) -> Explanation:
    """What ``flash_kda.fwd`` would do with these arguments, and why. Takes what ``fwd`` takes, and never raises.

    Nothing is launched or written. The kernel is that of the tensors' device; whether sequences are cut into segments
    follows from the shapes and from the device's number of multiprocessors.
    """
    try:
        return _explain(arguments, options)
    except Exception as error:
        return Explanation("refused", False, str(error))


def _explain(arguments: tuple[Any, ...], options: dict[str, Any]) -> Explanation:
    from flash_kda import checks, forward, ops

    bound = inspect.signature(forward.fwd).bind(*arguments, **options)
    bound.apply_defaults()
    call_of = dict(bound.arguments)
    q = call_of["q"]
    if ops.is_traced(q):
        return Explanation("traced", False, "recorded as torch.ops.flash_kda.fwd, and decided when the program runs")
    call_of["batch_invariant"] = checks.keep_whole(call_of["batch_invariant"], call_of.pop("enable_cp"))
    call = checks.check(**call_of)
    if not q.is_cuda:
        return Explanation("reference", False, "CPU tensors run the plain-torch reference, which is right but slow")
    device = q.get_device()
    kernel, _, reason = device_code.choose(device)
    if kernel is None:
        return Explanation("refused", False, reason)
    if call_of["workspace"] is not None:
        checks.check_workspace(call_of["workspace"], forward.needed_workspace(call, device))
    cut = forward.segments(call, device) > 1
    return Explanation(kernel, cut, f"{reason}; {_why_cut(cut, bool(call[checks.WHOLE]), call_of)}")


def _why_cut(segments: bool, whole: bool, call_of: dict[str, Any]) -> str:
    if segments:
        return (
            "few and long sequences are cut into segments, since sequences times heads alone would not fill the GPU; "
            "heads whose states are forgotten within 48 tokens do not wait at a cut"
        )
    if call_of["batch_invariant"]:
        return "no sequence is cut into segments: the call asks for batch invariance"
    if whole:
        return "no sequence is cut into segments: the call asks for states inside of sequences"
    if os.environ.get("FLASH_KDA_SPLIT") == "0":
        return "no sequence is cut into segments: FLASH_KDA_SPLIT=0"
    return (
        "no sequence is cut into segments: it would not pay; where one crosses the end of a block's share, "
        "heads whose states are forgotten within 48 tokens do not wait"
    )


def _ordinal(device: Any) -> int:
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if device is not None:
        import torch

        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"kernels run on CUDA devices only, not on {named.type}")
        if named.index is not None:
            return int(named.index)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0
