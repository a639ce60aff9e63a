"""What is released was tested: each Hopper cubin in device-code.lock has a committed record of a passing run on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import ROOT
from tools.locks import read_device_code_lock

RECORDS = ROOT / "tests" / "gpu" / "records"


def passes(record: dict[str, Any]) -> bool:
    """Whether a record is of a run in which tests ran and all of them passed."""
    return bool(record["tests"]["failed"] == 0 and record["tests"]["passed"] > 0 and record["gpu"])


def evidence(folder: Path) -> set[tuple[str, str, str]]:
    """(unit, architecture, sha256) of every cubin that a passing record has tested."""
    tested = set()
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if passes(record):
            tested |= {(c["unit"], c["arch"], c["sha256"]) for c in record["cubins"]}
    return tested


def untested(locked: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """Locked cubins for sm_90a that no passing record has tested."""
    tested = evidence(folder)
    return [
        key for key, c in locked.items() if c["arch"] == "90a" and (c["unit"], c["arch"], c["sha256"]) not in tested
    ]


def test_every_hopper_cubin_was_tested_on_a_gpu() -> None:
    locked = read_device_code_lock()
    assert any(c["arch"] == "90a" for c in locked.values()), "device-code.lock holds no cubin for sm_90a"
    missing = untested(locked, RECORDS)
    assert missing == [], (
        f"no passing record in tests/gpu/records has tested {', '.join(missing)} as device-code.lock has it; "
        "run the GPU tests on a Hopper GPU with this build and commit the record: pytest tests/gpu --record NAME"
    )


def test_the_published_times_are_of_the_locked_code() -> None:
    newest = max(
        (ROOT / "benchmarks" / "results").glob("*.json"), key=lambda path: json.loads(path.read_text())["date"]
    )
    timed = {
        (c["unit"], c["arch"], c["sha256"])
        for path in json.loads(newest.read_text())["paths"].values()
        if (c := path.get("cubin"))
    }
    locked = {(c["unit"], c["arch"], c["sha256"]) for c in read_device_code_lock().values()}
    assert timed, f"{newest.name} times no kernel of this project"
    assert timed <= locked, f"{newest.name} is of other device code: measure anew, python -m benchmarks run"


CUBIN = {"unit": "u", "arch": "90a", "sha256": "a" * 64}
LOCKED = {"u/90a": CUBIN, "u/100a": {**CUBIN, "arch": "100a"}}
RECORD = {"gpu": "NVIDIA H200", "tests": {"passed": 3, "failed": 0, "skipped": 1}, "cubins": [CUBIN]}


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (RECORD, []),
        (None, ["u/90a"]),
        ({**RECORD, "tests": {"passed": 3, "failed": 1, "skipped": 0}}, ["u/90a"]),
        ({**RECORD, "tests": {"passed": 0, "failed": 0, "skipped": 9}}, ["u/90a"]),
        ({**RECORD, "gpu": ""}, ["u/90a"]),
        ({**RECORD, "cubins": [{**CUBIN, "sha256": "b" * 64}]}, ["u/90a"]),
        ({**RECORD, "cubins": []}, ["u/90a"]),
    ],
)
def test_what_counts_as_evidence(tmp_path: Path, record: "dict[str, Any] | None", missing: list[str]) -> None:
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert untested(LOCKED, tmp_path) == missing
