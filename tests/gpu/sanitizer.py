"""compute-sanitizer over small calls that take every path, for each kernel; writes what it said as a record.

    python tests/gpu/sanitizer.py --out FILE                                       # memcheck, synccheck, initcheck
    python tests/gpu/sanitizer.py --out OTHER --tools racecheck --native MODULE

Paths: short and empty sequences, shares with and without cuts, windows that prove and that do not, segments with them and chained, every form of input, states
saved on the way. initcheck watches all kernels of the process, for with a filter it takes what torch wrote for unwritten. racecheck needs a module in which every
lane arrives at the barriers (docs/kernel-notes.md, "Checks beyond the tests"), given as MODULE and built from the sources of the installed one. The flags of the workspace are zeroed before each call: blocks poll
them in memory that nobody wrote before, by design, for a ticket of 64 bits that it cannot hold.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from flash_kda.self_benchmark import KERNELS  # noqa: E402

SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
DONE = "all calls made"


def calls(native: str) -> None:
    """The calls that are watched."""
    if native:
        spec = importlib.util.spec_from_file_location("flash_kda._native", native)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["flash_kda._native"] = module
    import kda_cases as cases
    import torch
    from kda_cases import FP32, STRONG, WEAK

    # Bytes at a workspace's end that hold them.
    flags = (torch.cuda.get_device_properties(0).multi_processor_count + 1) * 88

    def call(problem: cases.Problem, **extras: Any) -> None:
        state = None if problem.initial_state is None else torch.zeros_like(problem.initial_state)
        workspace = cases.workspace_of(problem)
        workspace[-flags:].zero_()
        cases.call(problem, torch.zeros_like(problem.v), state, workspace=workspace, **extras)
        torch.cuda.synchronize()

    call(cases.make("cuda", [i * 7 % 40 for i in range(70)], 2, STRONG, initial=FP32))
    call(cases.equal_keys("cuda", 40, 1))
    for gate in (STRONG, WEAK):
        call(cases.make("cuda", None, 2, gate, batch=(1, 1040), initial=FP32))
        call(cases.make("cuda", None, 60, gate, batch=(1, 2000), initial=FP32))
        call(cases.make("cuda", None, 96, gate, batch=(1, 1600), initial=FP32))
    mixed = cases.make("cuda", None, 3, STRONG, batch=(1, 1040), initial=FP32)
    mixed.g[:, :, ::2] -= 7
    call(mixed)
    call(mixed, batch_invariant=True)
    call(cases.make("cuda", [700, 700, 650], 100, WEAK, initial=FP32))
    for problem in cases.forms("cuda", [33, 0, 20]).values():
        call(problem)
    given = cases.make("cuda", None, 2, STRONG, batch=(1, 1040), initial=FP32)
    call(cases.without_gate(given, cases.log_decays(given)))
    saved = torch.zeros(3, 2, cases.K, cases.K, device="cuda")
    call(cases.make("cuda", [70, 30], 2, WEAK, initial=FP32), intermediate_states=saved)
    print(DONE)


def check(tool: str, kernel: str, native: str) -> dict[str, Any]:
    """One tool over one kernel."""
    command = ["compute-sanitizer", "--tool", tool]
    if tool != "initcheck":
        command += ["--kernel-regex", "kns=flash_kda"]
    shown = [f"FLASH_KDA_KERNEL={kernel}", *command, "python", "tests/gpu/sanitizer.py", "--calls"]
    if native:
        shown += ["--native", "MODULE"]
    command += [sys.executable, str(HERE / "sanitizer.py"), "--calls", "--native", native]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "FLASH_KDA_KERNEL": kernel}, timeout=180, check=False
        )  # fmt: skip
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as end:
        text = str(end)
    found = SUMMARY.findall(text)
    return {
        "tool": tool,
        "kernel": kernel,
        "command": " ".join(shown),
        "output": [line for line in text.splitlines() if SUMMARY.search(line)] or text.splitlines()[-20:],
        "errors": max(int(a or b) for a, b in found) if found and DONE in text else None,
    }


def version() -> str:
    """compute-sanitizer's, in its own words."""
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default="memcheck,synccheck,initcheck")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--native", default="")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        calls(options.native)
        return 0
    import torch

    from flash_kda import device_code

    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sanitizer": version(),
        # Of the installed module. MODULE is another build of the same sources.
        "cubins": [
            {"unit": c.unit, "arch": c.arch, "sha256": c.sha256} for c in device_code.embedded() if c.arch == "90a"
        ],
        "every_lane_arrives": hashlib.sha256(Path(options.native).read_bytes()).hexdigest() if options.native else None,
        "results": [],
    }
    results = record["results"]
    for tool in options.tools.split(","):
        for kernel in options.kernels.split(","):
            results.append(check(tool, kernel, options.native))
            print(results[-1]["tool"], results[-1]["kernel"], results[-1]["output"][-1], flush=True)
            if options.out is not None:  # each time: what was found survives whatever comes later
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["errors"] == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
