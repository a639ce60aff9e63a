"""``python -m flash_kda bench``: its exit codes, its bookkeeping and its table, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_native  # noqa: E402

from flash_kda import __main__ as command_line  # noqa: E402
from flash_kda import bench, device_code, doctor, self_benchmark  # noqa: E402

CUBIN = {"unit": "sm90", "arch": "90a", "sha256": "1" * 64, "size": 40000}


class FakeTimer:
    swept = torch.zeros(())

    def median_us(self, call: Any, samples: int = 15, cold: bool = False) -> float:
        call()
        return 20.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine as one with an H200 looks to the bookkeeping."""
    monkeypatch.setattr(device_code, "_module", fake_native.FakeNative())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "Timer", FakeTimer)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda timer: 4.3e12)
    monkeypatch.setattr(bench, "driver_version", lambda: "580.1")
    monkeypatch.setattr(self_benchmark, "KERNELS", ("portable-wide", "sm90-wide", "other"))
    monkeypatch.setattr(self_benchmark, "find_spec", lambda name: None)


def row(median: float, **more: Any) -> dict[str, Any]:
    return {
        "row": {
            "seq_lens": "8192", "heads": 96, "regime": "weak", "state": "fp32", "median_us": median, "cold_us": 1.0,
            "floor_us": 10.0, "err_out": 4e-3, "err_state": 3e-3, **more,
        }
    }  # fmt: skip


def failure(why: str) -> dict[str, Any]:
    return {"row": {"seq_lens": "8192", "heads": 96, "regime": "weak", "state": "fp32", "failure": why}}


def children(monkeypatch: pytest.MonkeyPatch, **messages: list[dict[str, Any]]) -> list[str]:
    asked: list[str] = []

    def child(path: str, shapes: Any, bandwidth: float) -> Any:
        asked.append(path)
        yield from messages.get(path.replace("-", "_"), [{"not_run": "cannot run here"}])

    monkeypatch.setattr(self_benchmark, "_child", child)
    return asked


def test_the_table(gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = children(monkeypatch, sm90_wide=[{"cubin": CUBIN}, row(25.0)], portable_wide=[{"cubin": CUBIN}, row(50.0)])
    assert command_line.main(["bench"]) == doctor.GOOD
    said = capsys.readouterr()
    assert asked == ["sm90-wide", "portable-wide", "other"]  # the preferred one first
    assert "sm90-wide: 8192 tokens, 96 heads, weak: 25.0 us" in said.err
    assert "sm90-wide: sm90 90a, sha256 " + "1" * 64 + ", which calls use here" in said.out
    line = next(line for line in said.out.splitlines() if line.startswith("8192"))
    assert line.split() == ["8192", "96", "weak", "25.0", "50.0", "10.0", "2.50", "4.0e-03"]
    assert "other: not run: cannot run here" in said.out
    assert "FLA: not run: flash-linear-attention is not installed" in said.out


@pytest.mark.parametrize(
    ("preferred", "other", "code"),
    [
        ([row(25.0)], [failure("WrongResult: all")], doctor.GOOD),
        ([row(25.0), failure("WrongResult: all")], [row(50.0)], doctor.BROKEN),
        ([{"not_run": "its process ended: killed"}], [row(50.0)], doctor.BROKEN),
    ],
)
def test_the_kernel_that_calls_use_decides(
    preferred: Any,
    other: Any,
    code: int,
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    children(monkeypatch, sm90_wide=preferred, portable_wide=other)
    assert command_line.main(["bench", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == "NVIDIA H200"
    assert "killed" in str(preferred) or len(report["rows"]) == len(preferred) + len(other)
    if any("failure" in message.get("row", {}) for message in [*preferred, *other]):
        assert any("FAILED: WrongResult" in line for line in self_benchmark.describe(report))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_code, "_module", fake_native.FakeNative(driver=False))
    assert command_line.main(["bench"]) == doctor.REFERENCE_ONLY
    assert "no CUDA driver" in capsys.readouterr().err
    assert command_line.main(["bench", "--shapes", "8192x96"]) == 2
    assert "expected LENGTHS:HEADS" in capsys.readouterr().err
    monkeypatch.setattr(device_code, "_module", fake_native.FakeNative())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command_line.main(["bench"]) == doctor.REFERENCE_ONLY
    assert "torch sees none" in capsys.readouterr().err

    def no_module() -> Any:
        raise RuntimeError("flash_kda's compiled module is missing")

    monkeypatch.setattr(device_code, "native", no_module)
    assert command_line.main(["bench"]) == doctor.BROKEN
    assert "module is missing" in capsys.readouterr().err


def test_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from flash_kda.__main__ import main; sys.exit(main(['bench']))"
    root = str(Path(device_code.__file__).resolve().parent.parent)
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (doctor.NO_TORCH, "")
    assert done.stderr.startswith("bench needs torch >= 2.4: ")


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
def test_a_child_measures_each_shape_in_both_regimes(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench.make

    def make(shape: bench.Shape, regime: str, state: str) -> Any:
        if shape.heads == 3:
            raise MemoryError("too\nlarge")
        return right(shape, regime, state, "cpu")

    monkeypatch.setattr(bench, "make", make)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["-c", "sm90-wide", "4.3e12", "40,7:2", "16:3"])
    self_benchmark.child()
    messages = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines()]
    assert messages[0] == {"cubin": CUBIN}
    assert [(m["row"]["seq_lens"], m["row"]["regime"]) for m in messages[1:]] == [
        ("40,7", "strong"), ("40,7", "weak"), ("16", "strong"), ("16", "weak"),
    ]  # fmt: skip
    assert messages[1]["row"]["median_us"] == 20.0
    assert messages[4]["row"]["failure"] == "MemoryError: too large"
    monkeypatch.setattr(sys, "argv", ["-c", "portable-narrow", "4.3e12", "16:3"])
    self_benchmark.child()
    (message,) = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines()]
    assert message.keys() == {"not_run"}


def test_a_child_that_dies_is_reported() -> None:
    """Run for real: without a GPU, FLA's child cannot even make a stopwatch."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (message,) = self_benchmark._child(self_benchmark.FLA, [bench.Shape((16,), 1)], 4.3e12)
    assert message["not_run"].startswith("its process ended: ")
    assert len(message["not_run"]) > 25


def test_default_shapes_parse() -> None:
    for text in self_benchmark.SHAPES:
        shape = bench.parse_shape(text)
        assert f"{shape.seq_lens}:{shape.heads}" == text
