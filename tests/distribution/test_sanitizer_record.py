"""compute-sanitizer found nothing in the Hopper cubins of device-code.lock: each tool, over each kernel, with a committed record."""

import json
from pathlib import Path
from typing import Any

import pytest

from flash_kda.self_benchmark import KERNELS
from tools import ROOT
from tools.locks import read_device_code_lock

RECORDS = ROOT / "tests" / "gpu" / "records" / "sanitizer"
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")


def unit_of(kernel: str) -> str:
    return "portable" if kernel.startswith("portable") else kernel


def unchecked(locked: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """ "tool kernel" of each pair that no record shows to be without errors on the kernel's locked cubin for sm_90a.

    racecheck sees hazards that are none unless every lane arrives at a barrier, which takes a build of its own: its record names that
    build, and the cubins of the usual build of the same sources. The other tools count on the usual build alone.
    """
    clean = set()
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not (record["gpu"] and record.get("sanitizer")):
            continue
        cubins = {(c["unit"], c["sha256"]) for c in record.get("cubins", []) if c["arch"] == "90a"}
        for result in record["results"]:
            own_build = bool(record.get("every_lane_arrives"))
            if result["errors"] == 0 and result["command"] and own_build == (result["tool"] == "racecheck"):
                clean |= {(result["tool"], result["kernel"], unit, sha256) for unit, sha256 in cubins}
    hopper = {c["unit"]: c["sha256"] for c in locked.values() if c["arch"] == "90a"}
    return [
        f"{tool} {kernel}"
        for tool in TOOLS
        for kernel in KERNELS
        if (tool, kernel, unit_of(kernel), hopper[unit_of(kernel)]) not in clean
    ]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_found_nothing(tool: str) -> None:
    missing = [pair for pair in unchecked(read_device_code_lock(), RECORDS) if pair.startswith(tool)]
    assert missing == [], (
        f"no record in tests/gpu/records/sanitizer shows 0 errors of {', '.join(missing)} with the cubins of device-code.lock; "
        "on a Hopper GPU: python tests/gpu/sanitizer.py --out FILE, and for racecheck with --tools racecheck --native MODULE"
    )


CUBINS = [{"unit": unit, "arch": "90a", "sha256": unit[0] * 64} for unit in ("sm90", "portable")]
LOCKED = {f"{c['unit']}/90a": c for c in CUBINS}


def records(folder: Path, **changes: Any) -> None:
    for name, tools, build in (("usual", TOOLS[:3], None), ("lanes", TOOLS[3:], "b" * 64)):
        results = [{"tool": t, "kernel": k, "command": "c", "errors": 0} for t in tools for k in KERNELS]
        record = {"gpu": "H200", "sanitizer": "2025", "cubins": CUBINS, "every_lane_arrives": build, "results": results}
        (folder / f"{name}.json").write_text(json.dumps({**record, **changes}), encoding="utf-8")


ALL = [f"{tool} {kernel}" for tool in TOOLS for kernel in KERNELS]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, []),
        ({"gpu": ""}, ALL),
        ({"sanitizer": ""}, ALL),
        ({"results": []}, ALL),
        ({"cubins": CUBINS[:1]}, [pair for pair in ALL if "portable" in pair]),
        ({"cubins": [{**c, "sha256": "0" * 64} for c in CUBINS]}, ALL),
        ({"every_lane_arrives": None}, [pair for pair in ALL if pair.startswith("racecheck")]),
        ({"every_lane_arrives": "b" * 64}, [pair for pair in ALL if not pair.startswith("racecheck")]),
    ],
)
def test_what_counts_as_a_record(tmp_path: Path, changes: dict[str, Any], missing: list[str]) -> None:
    records(tmp_path, **changes)
    assert unchecked(LOCKED, tmp_path) == missing


@pytest.mark.parametrize("errors", [1, None])
def test_one_error_is_enough(tmp_path: Path, errors: "int | None") -> None:
    records(tmp_path)
    path = tmp_path / "usual.json"
    record = json.loads(path.read_text())
    record["results"][0]["errors"] = errors
    path.write_text(json.dumps(record))
    assert unchecked(LOCKED, tmp_path) == ALL[:1]
