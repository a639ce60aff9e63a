"""The stopwatch: it sees the GPU's time and no host time, and a sweep of the L2 cache costs the call, not the count."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flash_kda import bench, device_code  # noqa: E402

PACKAGE = Path(bench.__file__).resolve().parent.parent

BANDWIDTHS = {"H100": 3.3e12, "H200": 4.8e12}  # of the memory itself, bytes a second


def test_median_is_the_gpu_time() -> None:
    timer = bench.Timer()
    millisecond = timer.median_us(lambda: torch.cuda._sleep(2_000_000))
    assert timer.median_us(lambda: torch.cuda._sleep(4_000_000)) == pytest.approx(2 * millisecond, rel=0.1)
    small = torch.zeros(16, device="cuda")

    def slow_host() -> None:
        time.sleep(0.002)
        small.add_(1)

    assert timer.median_us(slow_host) < 100


def test_cold_calls_read_memory() -> None:
    timer = bench.Timer()
    source = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")  # fits into L2
    target = torch.empty_like(source)
    warm = timer.median_us(lambda: target.copy_(source))
    cold = timer.median_us(lambda: target.copy_(source), cold=True)
    assert cold > 1.1 * warm


def test_copy_bandwidth_is_below_the_memorys() -> None:
    found = bench.copy_bandwidth(bench.Timer())
    for name, limit in BANDWIDTHS.items():
        if name in torch.cuda.get_device_name(0):
            assert 0.5 * limit < found <= limit


@pytest.mark.parametrize("state", bench.STATES)
def test_a_problem_is_right_on_this_gpu(state: str) -> None:
    import flash_kda

    inputs = bench.make(bench.Shape((1000, 0, 33), 5), "weak", state)
    with torch.inference_mode():
        out, final = flash_kda.fwd(**inputs)
    assert bench.errors(inputs, out, final).good
    out[0, 5, 0] += 10
    assert not bench.errors(inputs, out, final).good


def test_the_command() -> None:
    command = [sys.executable, "-m", "flash_kda", "bench", "--json", "--shapes", "300,0,33:4"]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["preferred"] in report["cubins"]
    for path in report["cubins"]:
        rows = [row for row in report["rows"] if row["path"] == path]
        assert [row["regime"] for row in rows] == ["strong", "weak"]
        assert all(0 < row["median_us"] < 1000 for row in rows)


def test_the_benchmarks(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent.parent
    if root != PACKAGE:
        pytest.skip("benchmarks/ uses the flash_kda of its tree, and the one under test is installed elsewhere")
    command = [sys.executable, "-m", "benchmarks", "run", "--out", str(tmp_path / "x.json"), "--shapes", "300,0,33:4"]
    if device_code.choose(0).kernel != "sm90":
        command += ["--paths", str(device_code.choose(0).kernel)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["gpu"] == torch.cuda.get_device_name(0)
    assert {(row["path"], row["regime"]) for row in content["rows"]} == {
        (path, regime) for path in content["paths"] for regime in bench.REGIMES
    }
