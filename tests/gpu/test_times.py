"""CUDA-event medians of the six shapes that KDA kernels are usually compared on, with fp32 states in and out."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
import record  # noqa: E402
from kda_cases import FP32, MIXED_LENGTHS, REGIME, STRONG, WEAK  # noqa: E402

# (sequence lengths, heads): microseconds of MoonshotAI/FlashKDA (main of 2026-08-08) on one H200, same inputs, both regimes.
SHAPES = {
    "8192 H=96": ([8192], 96, 1403.9),
    "mixed H=96": (MIXED_LENGTHS, 96, 1395.6),
    "8x1024 H=96": ([1024] * 8, 96, 1189.8),
    "8192 H=64": ([8192], 64, 1194.5),
    "mixed H=64": (MIXED_LENGTHS, 64, 1015.2),
    "8x1024 H=64": ([1024] * 8, 64, 810.1),
}


@pytest.mark.parametrize("gate", [STRONG, WEAK], ids=REGIME.get)
@pytest.mark.parametrize("name", SHAPES)
def test_official_times(name: str, gate: float) -> None:
    lengths, H, peer = SHAPES[name]
    problem = cases.make("cuda", lengths, H, gate, initial=FP32)
    median = cases.median_microseconds(problem, warm_up=5, samples=25)
    record.time(f"{REGIME[gate]} {name}", median)
    if "H200" in torch.cuda.get_device_name(0):
        assert median <= 1.5 * peer, f"{median:.0f} us, and FlashKDA takes {peer:.0f} us"
