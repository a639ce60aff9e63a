"""What can be timed: our kernels, each forced, and public kernels for the same operation.

A path is run in a process of its own, with its environment: a GPU keeps the kernel of its first call. It is given the arguments of
``flash_kda.fwd`` and makes of them a call without arguments that returns (out, final state [N, H, V, K] or None).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Call = Callable[[], tuple[Any, Any]]


class Path(NamedTuple):
    prepare: Callable[[dict[str, Any]], Call]
    environment: Mapping[str, str]
    version: Callable[[], str]  # what ran; raises if it cannot run
    is_peer: bool
    needs: str = ""  # for --help


def _ours(inputs: dict[str, Any]) -> Call:
    from flash_kda.bench import our_call

    return our_call(inputs)


def _fla(inputs: dict[str, Any]) -> Call:
    from flash_kda.bench import fla_call

    return fla_call(inputs)


def _kernel(name: str, **environment: str) -> Path:
    def version() -> str:
        import flash_kda
        from flash_kda import device_code

        kernel, _, reason = device_code.choose(0)
        if kernel != name:
            raise RuntimeError(f"expected the kernel {name}, got {kernel}: {reason}")
        return flash_kda.__version__

    return Path(_ours, {"FLASH_KDA_KERNEL": name, **environment}, version, is_peer=False)


def _cudnn(inputs: dict[str, Any]) -> Call:
    import torch
    from cudnn.linear_attention.ops import kimi_delta_attention

    q = inputs["q"]
    offsets = inputs["cu_seqlens"]
    if offsets is None:
        offsets = torch.tensor([0, q.shape[1]], device=q.device, dtype=torch.int32)
    with_state = inputs["initial_state"] is not None
    arguments = {name: inputs[name][0] for name in ("q", "k", "v")}
    # The Hopper kernel reads g and beta in fp32, and would convert them in each call.
    arguments |= {name: inputs[name][0].float() for name in ("g", "beta")}
    arguments |= {
        "cu_seqlens": offsets,
        "scale": inputs["scale"],
        "initial_state": inputs["initial_state"],
        "output_final_state": with_state,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "gate_lower_bound": inputs["lower_bound"],
        "a_log": inputs["A_log"],
        "dt_bias": inputs["dt_bias"],
        "plan_name": "kda_hopper_cuda",
    }

    def call() -> tuple[Any, Any]:
        out, state = kimi_delta_attention(**arguments)
        return out.unsqueeze(0), state if with_state else None

    return call


def _installed(distribution: str, module: str) -> Callable[[], str]:
    def version() -> str:
        import importlib
        from importlib.metadata import PackageNotFoundError, version

        found = importlib.import_module(module)
        try:
            return version(distribution)
        except PackageNotFoundError:  # a folder on sys.path
            return str(getattr(found, "__version__", "unknown"))

    return version


PATHS: Mapping[str, Path] = MappingProxyType(
    {
        "sm90": _kernel("sm90"),
        "sm90-whole": _kernel("sm90", FLASH_KDA_SPLIT="0"),
        "portable-wide": _kernel("portable-wide"),
        "portable-narrow": _kernel("portable-narrow"),
        # FLA would hand the call to flash_kda if that is installed.
        "fla": Path(_fla, {"FLA_FLASH_KDA": "0"}, _installed("fla-core", "fla"), True, "flash-linear-attention 0.6"),
        "cudnn": Path(_cudnn, {}, _installed("nvidia-cudnn-frontend", "cudnn"), True, "nvidia-cudnn-frontend 1.32"),
    }
)
DEFAULT = ("sm90", "portable-wide")
OURS = tuple(name for name, path in PATHS.items() if not path.is_peer)
PEERS = tuple(name for name, path in PATHS.items() if path.is_peer)
