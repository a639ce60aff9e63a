"""Which cells miss what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import compare

PEERS = {
    "peers": {"flashkda": {}, "cudnn": {}, "fla": {}},
    "rows": [
        {"seq_lens": "64", "heads": 8, "strong": {"flashkda": 300.0, "cudnn": 200.0}, "weak": {"flashkda": 300.0}},
        {"seq_lens": "99", "heads": 8, "strong": {"flashkda": 300.0}, "weak": {"flashkda": 300.0}},
    ],
}
TARGETS = {
    "path": "sm90",
    "errors": {"strong": {"out": 4e-3, "state": 3e-3}, "weak": {"out": 5e-3, "state": 4e-3}},
    "geometric_mean_ratio": 2.5,
    "least_ratio": 1.0,
    "other_states": {"ratio": 1.02},
    "portable": {"path": "portable-wide", "no_slower_than": "flashkda"},
    "rows": [{"seq_lens": "64", "heads": 8, "strong": 90, "weak": 95}],
}


def row(median: float, regime: str = "strong", **changes: Any) -> dict[str, Any]:
    return {
        "seq_lens": "64", "heads": 8, "regime": regime, "state": "fp32", "path": "sm90", "median_us": median,
        "cold_us": median + 1, "floor_us": 10.0, "err_out": 3.9e-3, "err_state": 2.9e-3, **changes,
    }  # fmt: skip


def results(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    about = {"version": "1", "cubin": {"unit": "sm90", "arch": "90a", "sha256": "ab" * 32}}
    return {
        "gpu": "G", "driver": "1", "torch": "2", "date": "2026-01-01", "paths": {"sm90": about}, "rows": list(rows),
        "failures": [], **changes,
    }  # fmt: skip


def misses(*rows: dict[str, Any], path: str = "sm90") -> list[tuple[str, ...]]:
    return [cell.misses for cell in compare.cells(results(*rows), PEERS, TARGETS, path)]


def test_all_is_well() -> None:
    found = compare.cells(results(row(90.0), row(95.0, "weak")), PEERS, TARGETS, "sm90")
    assert [cell.misses for cell in found] == [(), ()]
    assert [(cell.best_peer, cell.target) for cell in found] == [("cudnn", 90), ("flashkda", 95)]
    assert found[0].ratio == pytest.approx(200 / 90)


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (row(90.1), "target 90 us"),
        (row(95.1, "weak"), "target 95 us"),
        (row(50.0, err_out=4.1e-3), "error of out 4.10e-03 > 4.00e-03"),
        (row(50.0, "weak", err_state=4.1e-3), "error of state 4.10e-03 > 4.00e-03"),
        (row(50.0, err_out=float("nan")), "error of out nan > 4.00e-03"),
        (row(301.0, seq_lens="99"), "slower than flashkda"),
        (row(301.0, path="portable-wide"), "slower than flashkda"),
    ],
)
def test_each_miss_is_flagged(missing: dict[str, Any], why: str) -> None:
    assert misses(missing, path=missing["path"]) == [(why,)]


def test_other_states_are_held_to_fp32() -> None:
    assert misses(row(50.0), row(50.9, state="bf16"), row(51.1, state="none", err_state=None)) == [
        (), (), ("slower than with fp32 states (50.0 us)",),
    ]  # fmt: skip


def test_targets_are_for_one_kernel() -> None:
    assert misses(row(299.0, path="portable-wide"), path="portable-wide") == [()]


def test_a_peer_of_the_same_run_replaces_the_kept_one() -> None:
    along = results(row(150.0), row(140.0, path="cudnn"), row(60.0, path="fla", state="bf16"))
    assert compare.peer_times(along, PEERS, "64", 8, "strong") == {"flashkda": 300.0, "cudnn": 140.0}
    (cell,) = compare.cells(along, PEERS, TARGETS, "sm90")
    assert cell.misses == ("target 90 us", "slower than cudnn")


def test_the_table_says_it_all() -> None:
    failure = {"seq_lens": "7", "heads": 8, "regime": "weak", "state": "fp32", "path": "sm90", "why": "wrong"}
    text = "\n".join(compare.table(results(row(100.0), row(90.0, "weak"), failures=[failure]), PEERS, TARGETS, "sm90"))
    assert "G, driver 1, torch 2, 2026-01-01" in text
    assert "sha256 " + "ab" * 32 in text
    assert "cudnn 200.0" in text
    assert "2 cells: geometric mean 2.58, least 2.00\n1 of 2 cells miss something" in text
    assert text.endswith("FAILED: 7, 8 heads, weak, fp32: wrong")
    text = "\n".join(compare.table(results(row(100.0)), PEERS, TARGETS, "sm90"))
    assert "least 2.00  MISSES the mean of 2.5" in text


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (results(row(50.0)), 0),
        (results(row(95.0)), 1),
        (results(row(89.0)), 1),  # the cell is in order, the mean is not
        (results(row(50.0), failures=[row(1.0) | {"why": "wrong"}]), 1),
    ],
)
def test_check_decides_the_exit_code(
    content: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PEERS_FILE", PEERS), ("TARGETS_FILE", TARGETS)):
        (tmp_path / name).write_text(json.dumps(value))
        monkeypatch.setattr(compare, name, tmp_path / name)
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert command.main(["table", str(tmp_path / "results.json")]) == 0
    assert command.main(["table", str(tmp_path / "results.json"), "--check"]) == code
    assert "best peer" in capsys.readouterr().out


def test_the_kept_files_fit_together() -> None:
    peers, targets = compare.load(compare.PEERS_FILE), compare.load(compare.TARGETS_FILE)
    shapes = {(entry["seq_lens"], entry["heads"]) for entry in peers["rows"]}
    assert len(shapes) == len(peers["rows"]) == 29
    assert {(entry["seq_lens"], entry["heads"]) for entry in targets["rows"]} <= shapes
    for entry in peers["rows"]:
        for regime in compare.REGIMES:
            assert entry[regime].keys() <= peers["peers"].keys()
            assert {"flashkda", "cudnn"} <= entry[regime].keys()
