"""The examples, on the CPU path and in small sizes, as a user runs them; tests/gpu/test_engines.py runs them on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


SMALL = ["--device", "cpu", "--tokens", "200", "--hidden", "64", "--heads", "1"]


@pytest.mark.parametrize("piece", ["64", "23"])
def test_chunked_prefill_equals_one_pass(piece: str) -> None:
    assert load("kimi_linear_block").main([*SMALL, "--piece", piece]) < 1e-2


@pytest.mark.parametrize("forgotten", ["state", "convolution"])
def test_what_a_block_carries_matters(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("kimi_linear_block")
    forward = example.KimiDeltaAttention.forward

    def forgetful(self: Any, x: Any, cache: Any) -> Any:
        out = forward(self, x, cache)
        cache.pop(forgotten)
        return out

    monkeypatch.setattr(example.KimiDeltaAttention, "forward", forgetful)
    assert example.main([*SMALL, "--piece", "64"]) > 1e-2


def test_a_serving_loop_equals_one_call_each() -> None:
    example = load("serving_loop")
    lengths = ["--lengths", "100", "17", "48", "1", "70"]
    assert example.main(["--device", "cpu", "--budget", "64", "--slots", "2", "--heads", "1", *lengths]) == 0


def test_a_serving_loop_needs_fresh_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at the end sees a request that inherits the state of another one."""
    example = load("serving_loop")
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: self)
    lengths = ["--lengths", "40", "40", "40"]
    assert example.main(["--device", "cpu", "--budget", "64", "--slots", "1", "--heads", "1", *lengths]) == 2


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_a_program(name: str) -> None:
    parent = str(Path(flash_kda.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": parent},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--device" in done.stdout
