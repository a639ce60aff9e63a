"""One path's process: checks and times the cases that it reads from stdin, and says each result in a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.paths import PATHS, Call
from flash_kda.bench import Errors, Shape, Timer, driver_version, errors, floor_us, make, parse_lengths


def main(name: str) -> None:
    import torch

    path = PATHS[name]
    say({"about": about(path.version(), path.is_peer)})
    timer = Timer()
    problem: Problem | None = None
    for line in sys.stdin:
        case = json.loads(line)
        try:
            with torch.inference_mode():
                if problem is None or problem.case != problem_of(case):
                    problem = None  # its memory is free before the next takes its own
                    problem = Problem(case)
                row = measure(path.prepare(problem.inputs), problem, timer, case["floor_bandwidth"])
        except Exception as error:  # of a peer, any kind; the other cases go on
            text = " ".join(str(error).split())[:300]
            say({"failure": f"{type(error).__name__}: {text}"})
            torch.cuda.synchronize()  # ends this process, and the cases go on in another, if the GPU is lost to it
        else:
            say(row)


def problem_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return (case["seq_lens"], case["heads"], case["regime"], case["state"])


class Problem:
    def __init__(self, case: dict[str, Any], device: str = "cuda") -> None:
        self.case = problem_of(case)
        seq_lens, heads, regime, self.state = self.case
        self.shape = Shape(parse_lengths(seq_lens), heads)
        self.inputs = make(self.shape, regime, self.state, device)


def measure(call: Call, problem: Problem, timer: Timer, bandwidth: float) -> dict[str, Any]:
    """Check, then time. A wrong result is a failure, and not timed."""
    out, state = call()
    found: Errors = errors(problem.inputs, out, state)
    if not found.good:
        return {"failure": f"wrong: relative error of out {found.out:.2e}, of the state {found.state or 0:.2e}"}
    del out, state
    median = timer.median_us(call)
    return {
        "row": {
            "median_us": round(median, 2),
            "cold_us": round(timer.median_us(call, cold=True), 2),
            "floor_us": round(floor_us(problem.shape, problem.state, bandwidth), 2),
            "err_out": float(f"{found.out:.3e}"),
            "err_state": None if found.state is None else float(f"{found.state:.3e}"),
        }
    }


def about(version: str, is_peer: bool) -> dict[str, Any]:
    """What ran: GPU and versions, and the machine code of one of our kernels."""
    import torch

    from flash_kda import device_code

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "torch": torch.__version__,
        "version": version,
    }
    if not is_peer:
        _, cubin, reason = device_code.choose(0)
        if cubin is None:
            raise RuntimeError(reason)
        found["cubin"] = {"unit": cubin.unit, "arch": cubin.arch, "sha256": cubin.sha256}
    return found


def say(message: dict[str, Any]) -> None:
    # Peers print too; what is ours is marked.
    print(f"@{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
