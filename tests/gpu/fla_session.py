"""A session with flash-linear-attention, in a process of its own: calls of ``chunk_kda``, which backend ran each, and how far its
results are from the fp64 recurrence. Prints them as JSON, and on stderr each case that is done.

    python fla_session.py [--device cuda] [--old-torch]

First with FLA's own backend for flash_kda, then after ``flash_kda.fla.register()``. Tests run it with the release of FLA that is
first on the path.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from typing import Any

import autotuning


def old_torch() -> None:
    """Unwrap in ``torch.compiler.disable`` as torch did before it told copied attributes from its own: FLA 0.5.1 and 0.5.2 then
    lose the wrapper that chooses a backend."""
    from torch._dynamo import eval_frame

    def innermost(function: Any) -> Any:
        while hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        return function

    eval_frame.innermost_fn = innermost


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--old-torch", action="store_true")
    options = parser.parse_args()
    if options.old_torch:
        old_torch()
    autotuning.take_first()
    sys.modules["transformers"] = None  # type: ignore[assignment]  # FLA's models would import it, and none is needed

    import torch
    from fla import __version__

    try:
        from fla.ops import kda
    except Exception as error:  # FLA 0.5 with a Triton that is newer than it
        print(json.dumps({"version": __version__, "not importable": f"{type(error).__name__}: {error}"}))
        return

    import flash_kda

    device = options.device
    torch.set_num_threads(1)  # tiny tensors
    log: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    logging.getLogger("fla").addHandler(Handler())
    logging.getLogger("fla").setLevel(logging.INFO)

    calls: list[dict[str, Any]] = []
    fwd = flash_kda.fwd

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        return fwd(*arguments, **named)

    flash_kda.fwd = counted

    def registry() -> Any:
        try:
            import fla.backends as backends
        except ImportError:
            from fla.ops.kda.backends import kda_registry

            return kda_registry
        import inspect

        return backends._function_registries[inspect.unwrap(kda.chunk_kda)]

    def problem(
        T: int = 150, H: int = 2, HV: int = 2, K: int = 128, lengths: list[int] | None = None
    ) -> dict[str, Any]:
        torch.manual_seed(T + H + HV)
        N = 1 if lengths is None else len(lengths)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device=device).to(torch.bfloat16)

        arguments = {
            "q": normal(1, T, H, K), "k": normal(1, T, H, K), "v": normal(1, T, HV, K), "g": normal(1, T, HV, K) - 4,
            "beta": normal(1, T, HV), "A_log": torch.rand(HV, device=device), "dt_bias": torch.rand(HV * K, device=device),
            "initial_state": torch.randn(N, HV, K, K, device=device), "output_final_state": True, "scale": 0.1,
        }  # fmt: skip
        if lengths is not None:
            arguments["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
        return arguments

    def expected(a: dict[str, Any]) -> tuple[Any, Any]:
        """The fp64 recurrence by the meaning that FLA documents for these arguments."""
        gate = a.get("use_gate_in_kernel", False)
        v_first = a.get("state_v_first", False) or a.get("transpose_state_layout", False)
        A_log = None if a.get("A_log") is None else a["A_log"].view(-1)
        initial = a["initial_state"] if v_first else a["initial_state"].transpose(-1, -2)
        out, state = flash_kda.reference.chunked(
            a["q"], a["k"], a["v"], a["g"], a["beta"], a["scale"], A_log if gate else None,
            a.get("dt_bias") if gate else None, a.get("lower_bound") if gate else None, initial, a.get("cu_seqlens"),
            use_qk_l2norm_in_kernel=a.get("use_qk_l2norm_in_kernel", False), use_gate_in_kernel=gate,
            use_beta_sigmoid_in_kernel=a.get("use_beta_sigmoid_in_kernel", False),
            allow_neg_eigval=a.get("allow_neg_eigval", False),
        )  # fmt: skip
        return out, state if v_first else state.transpose(-1, -2)

    def distance(got: Any, right: Any) -> float:
        return float((got.double() - right).norm() / right.norm())

    def run(
        arguments: dict[str, Any], *, grad: bool = False, opt_out: bool = False, positional: int = 0
    ) -> dict[str, Any]:
        log.clear()
        calls.clear()
        registry()._logged.clear()  # FLA logs each backend once
        if opt_out:
            os.environ["FLA_FLASH_KDA"] = "0"
        result: dict[str, Any] = {}
        first = [arguments[name] for name in list(arguments)[:positional]]
        rest = {name: arguments[name] for name in list(arguments)[positional:]}
        try:
            with torch.enable_grad() if grad else torch.inference_mode():
                out, state, *intermediate = kda.chunk_kda(*first, **rest)
        except Exception as error:
            result["raised"] = f"{type(error).__name__}: {error}"
        else:
            right_out, right_state = expected(arguments)
            result["errors"] = [distance(out, right_out), distance(state, right_state)]
            result["state_dtype"] = str(state.dtype)
            result["out_dtype"] = str(out.dtype)
            if intermediate:
                result["intermediate"] = [list(intermediate[0].shape), str(intermediate[0].dtype)]
                start = {n: arguments[n][:, : arguments.get("chunk_size", 64)] for n in ("q", "k", "v", "g", "beta")}
                rights = [arguments["initial_state"].double(), expected({**arguments, **start})[1]]
                result["intermediate_errors"] = [
                    distance(intermediate[0][:, i], right) for i, right in enumerate(rights)
                ]
        finally:
            os.environ.pop("FLA_FLASH_KDA", None)
        return {**result, "fwd_calls": len(calls), "log": list(log)}

    found: dict[str, Any] = {"version": __version__, "torch": torch.__version__}

    def case(name: str, arguments: dict[str, Any], **options: Any) -> None:
        started = time.monotonic()
        found[name] = run(arguments, **options)
        print(f"PROGRESS {time.monotonic() - started:.1f} s: {name}", file=sys.stderr, flush=True)

    v_first = {"transpose_state_layout" if __version__ == "0.5.0" else "state_v_first": True}
    inside = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    bounded = {**inside, "safe_gate": True, "lower_bound": -5.0}

    # What FLA's own backend lets through, and what keeps it out.
    served = {**problem(), **bounded, **v_first}
    case("built in", served)
    case("built in, varlen", {**problem(lengths=[70, 80]), **bounded, **v_first})
    case("built in, opted out", served, opt_out=True)
    case("built in, gradients recorded", served, grad=True)
    case("built in, K-first", {**problem(), **bounded})
    case("built in, negative eigenvalues", {**served, "allow_neg_eigval": True})

    flash_kda.fla.register()
    flash_kda.fla.register()  # once more: nothing happens
    found["registry"] = sorted(registry()._backends)
    grouped = problem(HV=6)
    activated = {**problem(), "beta": torch.rand(1, 150, 2, device=device)}
    decay = {**activated, "g": -(torch.rand(1, 150, 2, 128, device=device) ** 4)}
    case("as built in", served)
    case("opted out", served, opt_out=True)
    case("gradients recorded, none needed", served, grad=True)
    case("K-first", {**problem(), **bounded})
    case("grouped value heads", {**grouped, **bounded})
    case("negative eigenvalues", {**served, "allow_neg_eigval": True})
    case("unbounded gate", {**problem(), **inside})
    case("no dt_bias", {**served, "dt_bias": None})
    case("no A_log", {**served, "A_log": None})
    case("A_log of a model", {**served, "A_log": served["A_log"].view(1, 1, 2, 1)})
    case("activated beta, fp32", {**activated, **bounded, "use_beta_sigmoid_in_kernel": False})
    case("log-decay, fp32", {**decay, "use_qk_l2norm_in_kernel": True})
    case("int32 offsets", {**(p := problem(lengths=[70, 0, 80])), **bounded, "cu_seqlens": p["cu_seqlens"].int()})
    case("intermediate states", {**problem(), **bounded, "return_intermediate_states": True})
    case("intermediate states, V-first", {**served, "return_intermediate_states": True})
    case("positional", served_by_position(served), positional=8)
    case("transposed q", {**served, "q": served["q"].transpose(2, 3).contiguous().transpose(2, 3)})

    learns = {**served, "v": served["v"].clone().requires_grad_()}
    case("a gradient is needed", learns, grad=True)
    case("an unknown option", {**served, "no_such_option": 1})
    case("half precision", {**served, **{n: served[n].half() for n in ("q", "k", "v", "g", "beta")}})
    case("head dimension 64", {**problem(K=64), **bounded, **v_first})
    case("chunks of 32", {**served, "return_intermediate_states": True, "chunk_size": 32})
    case("a bound out of range", {**served, "safe_gate": False, "lower_bound": -9.0})
    found["counts"] = dict(flash_kda.fla.counts)
    print(json.dumps(found))


def served_by_position(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, the first eight in the order in which every release has them."""
    order = ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state")
    return {name: arguments[name] for name in (*order, *(n for n in arguments if n not in order))}


if __name__ == "__main__":
    main()
