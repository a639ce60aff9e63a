"""What ``python -m flash_kda doctor`` finds out. Works without torch, without a driver, and without the compiled module."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flash_kda
from flash_kda import device_code

# Exit codes. 2 is left to argparse: a wrong command line.
GOOD, BROKEN, REFERENCE_ONLY, NO_TORCH = 0, 1, 3, 4

SELF_CHECK_LIMIT = 1e-2  # relative error of bf16 results against fp64; 5e-3 is usual


def examine() -> dict[str, Any]:
    """Everything that the doctor reports, as plain JSON values; ``verdict`` and ``exit_code`` sum it up."""
    report: dict[str, Any] = {
        "flash_kda": flash_kda.__version__,
        "path": str(Path(flash_kda.__file__).resolve().parent),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "torch": _torch(),
        "fla": _package("flash-linear-attention", "fla"),
        "module": {"loaded": True, "reason": ""},
        "driver": None,
        "asked_for": os.environ.get("FLASH_KDA_KERNEL", ""),
        "cubins": [],
        "gpus": [],
    }
    try:
        module = device_code.native()
    except RuntimeError as error:
        report["module"] = {"loaded": False, "reason": str(error)}
    else:
        report["driver"] = {**module.driver(), "kernel_module": kernel_driver_version()}
        report["cubins"] = [
            {**cubin._asdict(), "runs_on": device_code.serves(cubin.arch)} for cubin in device_code.embedded()
        ]
        report["gpus"] = [_gpu(gpu) for gpu in device_code.gpus()]
    report["self_check"] = _self_check(report)
    report["exit_code"], report["verdict"] = _verdict(report)
    return report


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report in lines of text."""

    def row(label: str, text: str) -> str:
        return f"{label:<12}{text}"

    yield row("flash_kda", f"{report['flash_kda']}  ({report['path']})")
    yield row("python", f"{report['python']} on {report['platform']}")
    torch = report["torch"]
    if torch["version"]:
        yield row("torch", f"{torch['version']}, built for {torch['cuda'] or 'CPU only'}")
    else:
        yield row("torch", f"not found: {torch['reason']}")
    yield row("FLA", report["fla"] or "not found (optional)")
    if not report["module"]["loaded"]:
        yield row("module", f"NOT LOADED: {report['module']['reason']}")
    else:
        yield row("module", "loaded")
        driver = report["driver"]
        if driver["loaded"]:
            number = driver["version"]
            kernel = driver["kernel_module"]
            yield row(
                "driver",
                f"CUDA {number // 1000}.{number % 1000 // 10}" + (f", kernel module {kernel}" if kernel else ""),
            )
        else:
            yield row("driver", f"not found: {driver['reason']}")
        yield row("machine code", "" if report["cubins"] else "none embedded")
        for cubin in report["cubins"]:
            yield (
                f"    {cubin['unit']:<10}{cubin['arch']:<6}for {cubin['runs_on']:<20}"
                f"{cubin['size'] // 1024:>5} KiB  sha256 {cubin['sha256']}"
            )
        if not report["gpus"]:
            yield row("GPUs", "none visible")
            if report["asked_for"]:
                yield row("", f"FLASH_KDA_KERNEL={report['asked_for']} is set; it has a say once there is one")
        for gpu in report["gpus"]:
            yield row(
                f"GPU {gpu['ordinal']}", f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['sm_count']} SMs"
            )
            if gpu["kernel"]:
                cubin = gpu["cubin"]
                yield f"    uses {gpu['kernel']}, {gpu['reason']} ({cubin['unit']} {cubin['arch']}, sha256 {cubin['sha256']})"
            else:
                yield f"    no kernel: {gpu['reason']}"
            for other in gpu["not_used"]:
                yield f"    not {other['unit']} {other['arch']}: {other['reason']}"
    for check in report["self_check"]:
        yield row("self-check", f"{check['what']}: {check['result']}")
    yield row("verdict", report["verdict"])


def _package(distribution: str, module: str) -> str | None:
    """Version of an installed package, found without importing it."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "found, of unknown version"


def _torch() -> dict[str, Any]:
    try:
        import torch

        cuda = None
        if torch.version.cuda:
            cuda = f"CUDA {torch.version.cuda}"
        elif getattr(torch.version, "hip", None):
            cuda = f"ROCm {torch.version.hip}"
        return {"version": torch.__version__, "cuda": cuda, "reason": ""}
    except Exception as error:  # a torch that is there but broken fails in many ways; all of them are for the report
        return {"version": None, "cuda": None, "reason": f"{type(error).__name__}: {error}"}


def kernel_driver_version() -> str | None:
    """Version of the NVIDIA kernel module, such as 580.65.06, if the system tells."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _gpu(gpu: device_code.Gpu) -> dict[str, Any]:
    kernel, cubin, reason = device_code.choose(gpu.ordinal)
    not_used = []
    for other in device_code.embedded():
        if other == cubin:
            continue
        runs_on = device_code.serves(other.arch)
        if not device_code.runs(other.arch, gpu.major, gpu.minor):
            why = f"runs on compute capability {runs_on}, and this is {gpu.capability}"
        elif cubin is not None:
            why = f"would run, but {kernel} was chosen: {reason}"
        else:
            why = "see above"
        not_used.append({"unit": other.unit, "arch": other.arch, "reason": why})
    return {
        "ordinal": gpu.ordinal,
        "name": gpu.name,
        "capability": gpu.capability,
        "sm_count": gpu.sm_count,
        "total_memory": gpu.total_memory,
        "kernel": kernel,
        "cubin": None if cubin is None else cubin._asdict(),
        "reason": reason,
        "not_used": not_used,
    }


def _self_check(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each GPU that has a kernel with the oracle; without one, the chunked reference with the recurrence."""
    if not report["torch"]["version"]:
        return [{"what": "nothing run", "result": "skipped: torch is not installed", "passed": None}]
    import torch

    usable = [gpu for gpu in report["gpus"] if gpu["kernel"]]
    devices = [f"cuda:{gpu['ordinal']}" for gpu in usable] if torch.cuda.is_available() else []
    checks = []
    for device in devices or ["cpu"]:
        what = (
            f"kernel on {device} against the fp64 recurrence"
            if devices
            else "chunked reference against the fp64 recurrence"
        )
        try:
            error = _compare(device)
        except Exception as failure:  # whatever breaks a call belongs in the report
            checks.append({"what": what, "result": f"FAILED: {type(failure).__name__}: {failure}", "passed": False})
            continue
        passed = error <= SELF_CHECK_LIMIT  # False for NaN
        result = f"relative error {error:.1e}, " + ("good" if passed else f"FAILED: more than {SELF_CHECK_LIMIT:.0e}")
        checks.append({"what": what, "result": result, "passed": passed})
    return checks


def _compare(device: str) -> float:
    """Largest relative error of out and state on a small problem: tails, an empty sequence, an initial state, a weak gate."""
    import warnings

    import torch

    from flash_kda import forward, reference

    generator = torch.Generator().manual_seed(0)
    T, H, K, N = 100, 2, 128, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, g = (normal(1, T, H, K).bfloat16() for _ in range(4))
    inputs = {
        "q": q, "k": k, "v": v, "g": g - 7, "beta": normal(1, T, H).bfloat16(), "scale": K**-0.5,
        "A_log": normal(H), "dt_bias": normal(H, K), "lower_bound": -5.0,
        "initial_state": normal(N, H, K, K), "cu_seqlens": torch.tensor([0, 63, 63, T]),
    }  # fmt: skip
    expected = reference.recurrent(**inputs)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    got: tuple[torch.Tensor, torch.Tensor]
    if device == "cpu":
        got = reference.chunked(**moved, dtype=torch.float32)
    else:
        state = torch.empty_like(moved["initial_state"])
        with warnings.catch_warnings(), torch.no_grad():
            out, _ = forward.fwd(out=None, final_state=state, **moved)
        got = out.cpu(), state.cpu()
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, expected))


def _verdict(report: dict[str, Any]) -> tuple[int, str]:
    if not report["module"]["loaded"]:
        return BROKEN, f"BROKEN: {report['module']['reason']}"
    if not report["cubins"]:
        return BROKEN, "BROKEN: the compiled module carries no machine code"
    if not report["torch"]["version"]:
        return (
            NO_TORCH,
            "INCOMPLETE: the installation is in order, but torch >= 2.4 is needed to run it; nothing was run",
        )
    failed = [check["what"] for check in report["self_check"] if not check["passed"]]
    if failed:
        return BROKEN, f"BROKEN: self-check failed: {', '.join(failed)}"
    usable = [gpu for gpu in report["gpus"] if gpu["kernel"]]
    if not usable:
        why = report["gpus"][0]["reason"] if report["gpus"] else "no GPU is visible"
        return REFERENCE_ONLY, f"CPU REFERENCE ONLY: the installation is in order, but no kernel can run here: {why}"
    if not report["torch"]["cuda"]:
        return (
            REFERENCE_ONLY,
            "CPU REFERENCE ONLY: this torch is built without CUDA, so it cannot hold tensors on the GPU",
        )
    if not any("cuda" in check["what"] for check in report["self_check"]):
        return (
            REFERENCE_ONLY,
            "CPU REFERENCE ONLY: the driver shows a GPU, but torch cannot use it (torch.cuda.is_available() is false)",
        )
    idle = len(report["gpus"]) - len(usable)
    return GOOD, f"GOOD: {len(usable)} GPU(s) ready" + (f", {idle} without a kernel" if idle else "")
