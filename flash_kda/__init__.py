"""Kimi Delta Attention for NVIDIA GPUs: ``flash_kda.fwd``, its oracle ``flash_kda.reference``, and the engines that call it.

Names load on first use, so that importing the package needs neither torch nor a driver; only ``is_available`` and
``device_code`` work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_kda import device_code, fla, ops, reference, vllm
    from flash_kda.availability import explain, is_available
    from flash_kda.forward import fwd, get_workspace_size

    __version__: str

__all__ = [
    "__version__",
    "device_code",
    "explain",
    "fla",
    "fwd",
    "get_workspace_size",
    "is_available",
    "ops",
    "reference",
    "vllm",
]

# public name -> (module, attribute); None: the module itself
_PUBLIC = {
    "device_code": ("flash_kda.device_code", None),
    "explain": ("flash_kda.availability", "explain"),
    "fla": ("flash_kda.fla", None),
    "fwd": ("flash_kda.forward", "fwd"),
    "get_workspace_size": ("flash_kda.forward", "get_workspace_size"),
    "is_available": ("flash_kda.availability", "is_available"),
    "ops": ("flash_kda.ops", None),
    "reference": ("flash_kda.reference", None),
    "vllm": ("flash_kda.vllm", None),
}


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _PUBLIC:
        module_name, attribute = _PUBLIC[name]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"flash_kda.{name} needs torch >= 2.4, which is not installed (pip install 'torch>=2.4')"
            ) from error
        value = module if attribute is None else getattr(module, attribute)
    else:
        raise AttributeError(f"module 'flash_kda' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flash_kda")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
