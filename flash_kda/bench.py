"""Times of calls: random problems, their floor, a check against fp64, and CUDA-event medians.

``python -m flash_kda bench`` uses it on the user's own GPU (``self_benchmark``); the benchmarks of the source tree use the same
functions. Needs torch.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from flash_kda import reference
from flash_kda.doctor import kernel_driver_version

K = 128
LOWER_BOUND = -5.0
# Mean of the raw gate, whose variance is 1. strong: the usual benchmark input, a state is forgotten within 16 tokens. weak: what
# trained models have in many channels, a state lives for thousands of tokens.
REGIMES = {"strong": 0.0, "weak": -7.0}
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}

ERROR_LIMIT = 1e-2  # relative, of a result that is worth timing; 5e-3 is usual
CHECKED_HEADS = 4

L2_BYTES = 256 << 20  # more than any GPU's level-2 cache
CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, within what clocks differ by


class Shape(NamedTuple):
    """Sequences laid end to end, and their heads."""

    lengths: tuple[int, ...]
    heads: int

    @property
    def seq_lens(self) -> str:
        """Lengths in the notation of ``parse_lengths``."""
        parts: list[list[int]] = []
        for length in self.lengths:
            if parts and parts[-1][1] == length:
                parts[-1][0] += 1
            else:
                parts.append([1, length])
        return ",".join(str(length) if count == 1 else f"{count}x{length}" for count, length in parts)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of sequences from text: "8191,64x1" is one of 8191 tokens and 64 of one token each.

    Raises:
        ValueError: if the text is nothing of the kind.
    """
    lengths: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if found is None:
            raise ValueError(f"expected lengths such as 8192 or 1300,547 or 8191,64x1, got {text!r}")
        lengths += int(found[1] or 1) * [int(found[2])]
    return tuple(lengths)


def parse_shape(text: str) -> Shape:
    """A shape from lengths and heads: "8191,64x1:16". Raises ValueError if it is nothing of the kind."""
    lengths, _, heads = text.rpartition(":")
    if not lengths or not heads.isdigit():
        raise ValueError(f"expected LENGTHS:HEADS, such as 8192:96 or 8191,64x1:16, got {text!r}")
    return Shape(parse_lengths(lengths), int(heads))


def moved_bytes(shape: Shape, state: str) -> int:
    """Bytes of a call's inputs and results, each moved once: q, k, v, g, out and beta in bf16, states in and out."""
    tokens, sequences = sum(shape.lengths), len(shape.lengths)
    dtype = STATES[state]
    state_bytes = 0 if dtype is None else 2 * K * K * dtype.itemsize
    return shape.heads * (tokens * (5 * K + 1) * 2 + sequences * state_bytes)


def floor_us(shape: Shape, state: str, bytes_per_second: float) -> float:
    """Microseconds in which memory alone could serve a call."""
    return moved_bytes(shape, state) / bytes_per_second * 1e6


def make(shape: Shape, regime: str, state: str, device: str = "cuda", seed: int = 0) -> dict[str, Any]:
    """Arguments of a ``fwd`` call with random inputs, results allocated.

    q, k, v ~ N(0, 1), g ~ N(mean of the regime, 1), beta ~ N(0, 1), A_log and dt_bias ~ U(0, 1), states ~ N(0, 1).
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens, sequences, H = sum(shape.lengths), len(shape.lengths), shape.heads

    def normal(*size: int, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(mean, 1.0, generator=generator)

    rows = (1, tokens, H, K)
    inputs: dict[str, Any] = {name: normal(*rows) for name in ("q", "k", "v")}
    inputs |= {"g": normal(*rows, mean=REGIMES[regime]), "beta": normal(*rows[:3]), "scale": K**-0.5}
    inputs["out"] = torch.empty(rows, dtype=torch.bfloat16, device=device)
    inputs["A_log"] = torch.rand(H, device=device, generator=generator)
    inputs["dt_bias"] = torch.rand(H, K, device=device, generator=generator)
    inputs["lower_bound"] = LOWER_BOUND
    dtype = STATES[state]
    inputs["initial_state"] = None if dtype is None else normal(sequences, H, K, K, dtype=dtype)
    inputs["final_state"] = None if dtype is None else torch.empty(sequences, H, K, K, dtype=dtype, device=device)
    offsets = torch.tensor([0, *shape.lengths]).cumsum(0)
    inputs["cu_seqlens"] = None if sequences == 1 else offsets.to(device=device, dtype=torch.int32)
    return inputs


class Errors(NamedTuple):
    """``||x - x_fp64|| / ||x_fp64||`` of outputs and of final states (None: there are none)."""

    out: float
    state: float | None

    @property
    def good(self) -> bool:
        return all(value is None or value <= ERROR_LIMIT for value in self)  # False for NaN


def errors(inputs: dict[str, Any], out: Tensor, state: Tensor | None) -> Errors:
    """Compare results ``[1, T, H, V]``, ``[N, H, V, K]`` with fp64, on a few heads, which do not mix; and look that all are finite."""
    if not out.isfinite().all() or (state is not None and not state.isfinite().all()):
        return Errors(float("nan"), None if state is None else float("nan"))
    H = out.shape[2]
    chosen = sorted({i * (H - 1) // max(CHECKED_HEADS - 1, 1) for i in range(CHECKED_HEADS)})
    part = {name: inputs[name][:, :, chosen] for name in ("q", "k", "v", "g", "beta")}
    part |= {name: inputs[name][chosen] for name in ("A_log", "dt_bias")}
    initial = inputs["initial_state"]
    expected_out, expected_state = reference.chunked(
        **part,
        scale=inputs["scale"],
        lower_bound=inputs["lower_bound"],
        initial_state=None if initial is None else initial[:, chosen],
        cu_seqlens=inputs["cu_seqlens"],
    )
    return Errors(
        _distance(out[:, :, chosen], expected_out),
        None if state is None else _distance(state[:, chosen], expected_state),
    )


def _distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


class Timer:
    """Medians of a call on one GPU, of the GPU's time alone: the host has always run ahead when the first event is reached."""

    def __init__(self, device: str = "cuda") -> None:
        self.swept = torch.zeros(L2_BYTES // 4, device=device)
        self.sum = torch.zeros((), device=device)

    def median_us(self, call: Callable[[], Any], samples: int = 15, *, cold: bool = False) -> float:
        """Microseconds between CUDA events before and after ``call``.

        As they come, calls find in the level-2 cache what the one before left there. ``cold``: before each, the cache is swept by
        reading 256 MiB, which leaves no modified lines to write back.
        """
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        host_seconds = time.perf_counter() - begun
        torch.cuda.synchronize()
        cycles = int(CYCLES_PER_SECOND * (50e-6 + 2 * host_seconds))

        def once() -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(cycles)
            if cold:
                torch.sum(self.swept, 0, out=self.sum)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3

        return statistics.median(once() for _ in range(samples))


Call = Callable[[], tuple[Tensor, Optional[Tensor]]]


def measure(
    call: Call, shape: Shape, state: str, inputs: dict[str, Any], timer: Timer, bandwidth: float
) -> dict[str, Any]:
    """Check a call's results, then time it.

    Returns:
        ``median_us``, ``cold_us``, ``floor_us``, ``err_out`` and ``err_state``, ready for JSON.

    Raises:
        WrongResult: before anything is timed.
    """
    out, final_state = call()
    found = errors(inputs, out, final_state)
    if not found.good:
        raise WrongResult(f"relative error of out {found.out:.2e}, of the state {found.state or 0:.2e}")
    del out, final_state
    return {
        "median_us": round(timer.median_us(call), 2),
        "cold_us": round(timer.median_us(call, cold=True), 2),
        "floor_us": round(floor_us(shape, state, bandwidth), 2),
        "err_out": float(f"{found.out:.3e}"),
        "err_state": None if found.state is None else float(f"{found.state:.3e}"),
    }


class WrongResult(Exception):
    """A kernel's result is farther from fp64 than ERROR_LIMIT."""


def our_call(inputs: dict[str, Any]) -> Call:
    """``fwd`` with these arguments."""
    from flash_kda.forward import fwd

    return lambda: fwd(**inputs)


def fla_call(inputs: dict[str, Any]) -> Call:
    """The same by flash-linear-attention's ``chunk_kda`` (0.6 or later), which takes no bf16 states.

    With FLA_FLASH_KDA=0 in the environment that is its Triton kernels; it would else hand the call to flash_kda.
    """
    from fla.ops.kda import chunk_kda

    with_state = inputs["initial_state"] is not None
    arguments = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "scale", "A_log", "lower_bound")}
    arguments |= {
        "dt_bias": inputs["dt_bias"].flatten(),
        "initial_state": inputs["initial_state"].float() if with_state else None,
        "output_final_state": with_state,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "state_v_first": True,
        "cu_seqlens": None if inputs["cu_seqlens"] is None else inputs["cu_seqlens"].long(),
    }
    return lambda: chunk_kda(**arguments)


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per second, read and written, of a copy within the GPU's memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=timer.swept.device)
    target = torch.empty_like(source)
    return float(2 * source.numel()) / (timer.median_us(lambda: target.copy_(source), 7) * 1e-6)


def driver_version() -> str:
    """Version of the NVIDIA driver, such as 580.65.06, or "unknown"."""
    found = kernel_driver_version()
    if found is not None:
        return found
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.split("\n")[0].strip() or "unknown"
