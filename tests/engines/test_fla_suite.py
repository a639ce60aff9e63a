"""tests/gpu/fla_suite.py, which runs FLA's own tests on a GPU: it chooses, adds and counts as it says. And what it has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "gpu" / "fla_suite.py"
RECORDS = sorted((HERE / "records").glob("fla-*.json"))

# In the place of FLA's tests/ops/test_kda.py, with its names and parameters.
TESTS = """
import pytest
import torch
from fla.ops.kda import chunk_kda

@pytest.mark.parametrize(
    ("H", "D", "mask_p", "cu_seqlens", "dtype", "use_gate_in_kernel", "safe_gate", "disable_recompute"),
    [(4, 128, 0.5, [0, 20], torch.bfloat16, False, False, False)],
)
@torch.inference_mode()
def test_chunk_varlen_prefill(H, D, mask_p, cu_seqlens, dtype, use_gate_in_kernel, safe_gate, disable_recompute):
    assert (H, D, dtype) == (4, 128, torch.bfloat16)
    T = cu_seqlens[-1]
    rows = torch.zeros(1, T, H, D, dtype=dtype)
    gate = {"A_log": torch.zeros(1, 1, H, 1), "dt_bias": torch.zeros(H * D)} if use_gate_in_kernel else {}
    for _ in range(2):
        chunk_kda(rows, rows, rows, rows, rows[..., 0], cu_seqlens=torch.tensor(cu_seqlens),
                  use_gate_in_kernel=use_gate_in_kernel, safe_gate=safe_gate, **gate)

_FLASH_KDA_REQUIRED_KWARGS = dict(use_gate_in_kernel=True, lower_bound=-5.0)

def _flash_kda_run(monkeypatch, positional=False, **options):
    raise AssertionError("the helper was not replaced")

@pytest.mark.parametrize("positional", [False, True])
def test_flash_kda_chunk(positional, monkeypatch):
    rows = torch.zeros(1, 9, 2, 128, dtype=torch.bfloat16)
    _flash_kda_run(monkeypatch, positional, q=rows, k=rows, v=rows, g=rows, beta=rows[..., 0], A_log=None)

def test_chunk():
    raise AssertionError("not a forward test")
"""

TROUBLED = """
import os
import pytest
from fla.ops.kda import chunk_kda

@pytest.mark.parametrize("what", ["is skipped", "ends the process", "fails", "comes after it"])
def test_flash_kda_chunk(what):
    if what == "is skipped":
        pytest.skip("this one is skipped")
    assert what != "fails", "this one fails"
    os._exit(1)
"""


def test_what_it_runs_and_counts(with_fla: Any, tmp_path: Path) -> None:
    (tmp_path / "test_kda.py").write_text(TESTS)
    out = tmp_path / "record.json"
    options = ["--longest", "1000", "--processes", "2", "--out", str(out)]
    said = with_fla("0.6.0", PROGRAM, str(tmp_path / "test_kda.py"), *options)
    assert "FLA 0.6.0: {'passed': 5}; 5 passed through flash_kda.fla, 8 calls of chunk_kda" in said
    assert " s, 5 of 5: test_" in said
    record = json.loads(out.read_text())
    assert (record["passed_through_us"], record["calls_through_us"]) == (5, 8)
    assert sum(name.startswith("test_chunk_varlen_prefill[bf16-D128") for name in record["tests"]) == 2
    assert all(test["declined"] == {} for test in record["tests"].values())


def test_what_fails_is_skipped_or_does_not_end_is_recorded(with_fla: Any, tmp_path: Path) -> None:
    (tmp_path / "test_kda.py").write_text(TROUBLED)
    out = tmp_path / "record.json"
    options = ["--processes", "2", "--out", str(out)]
    said = with_fla("0.6.0", PROGRAM, str(tmp_path / "test_kda.py"), *options, status=1)
    assert "{'skipped': 1, 'unfinished': 2, 'failed': 1}; 0 passed" in said
    tests = json.loads(out.read_text())["tests"]
    assert tests["test_flash_kda_chunk[fails]"]["reason"] == "AssertionError: this one fails"
    assert "this one is skipped" in tests["test_flash_kda_chunk[is skipped]"]["reason"]
    assert tests["test_flash_kda_chunk[ends the process]"] == {"outcome": "unfinished"}
    assert tests["test_flash_kda_chunk[comes after it]"] == {"outcome": "unfinished"}


def test_a_limit_ends_it(with_fla: Any, tmp_path: Path) -> None:
    (tmp_path / "test_kda.py").write_text("import time\ntime.sleep(1000)\n")
    options = ["--processes", "1", "--limit", "1"]
    said = with_fla("0.6.0", PROGRAM, str(tmp_path / "test_kda.py"), *options, status=1)
    assert said.startswith("no process has chosen tests from ")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_run_on_a_gpu(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["gpu"]
    assert record["outcomes"].keys() <= {"passed", "skipped"}
    through = [test for test in record["tests"].values() if test["served"] and test["outcome"] == "passed"]
    # FLA's 14 tests of its own backend, the one of intermediate states, and the prefill with the five added sets of parameters.
    assert record["passed_through_us"] == len(through) >= 20
