"""FLA's own forward tests of KDA through ``flash_kda.fla``: which pass, and how many calls of ``chunk_kda`` ran here.

    python tests/gpu/fla_suite.py TEST_KDA [--out FILE] [--built-in] [--processes N] [--limit SECONDS]

TEST_KDA is tests/ops/test_kda.py of the flash-linear-attention repository, of the release that is on the path; no package holds it.
Its tests of training (all others) need gradients and are left out. The prefill test is also run with bf16 inputs of head dimension 128:
with FLA's own parameters, in fp16 or of other head dimensions, it stays with Triton. ``--built-in`` runs FLA's own backend for this
package instead, without ``register()``.

FLA's tests of its own backend also assert that some calls never reach ``flash_kda.fwd``. With ``register()`` they do, by intention:
that one assertion is left out.

What takes time is Triton's compiler, on one core. So several processes share the tests (``fla_share.py``), and Triton takes the first
configuration that runs (``autotuning.py``). At the limit every process ends; what it has not run is recorded as unfinished.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

SHARE = Path(__file__).resolve().with_name("fla_share.py")


class Run:
    """What the processes have told so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.about: dict[str, Any] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    def follow(self, share: int) -> None:
        """Run one process to its end."""
        options = self.options
        command = [sys.executable, "-W", "ignore", str(SHARE), options.test_kda, "--share", str(share)]
        for name in ("processes", "limit", "longest"):
            command += [f"--{name}", str(getattr(options, name))]
        if options.built_in:
            command.append("--built-in")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                with self.lock:
                    self.note(json.loads(line))

    def note(self, event: dict[str, Any]) -> None:
        if "chosen" in event:
            self.about = event["about"]
            self.tests = {name: self.tests.get(name, {"outcome": "unfinished"}) for name in event["chosen"]}
            return
        name = event.pop("test")
        self.tests[name].update(event)
        done = sum(test["outcome"] != "unfinished" for test in self.tests.values())
        seconds = time.monotonic() - self.started
        print(f"PROGRESS {seconds:.0f} s, {done} of {len(self.tests)}: {name} {event['outcome']}", flush=True)
        self.write()

    def record(self) -> dict[str, Any]:
        through = [test for test in self.tests.values() if test.get("served") and test["outcome"] == "passed"]
        return {
            **self.about, "backend": "FLA's own" if self.options.built_in else "flash_kda.fla",
            "autotuning": "first configuration that runs", "seconds": round(time.monotonic() - self.started),
            "outcomes": dict(Counter(test["outcome"] for test in self.tests.values())), "passed_through_us": len(through),
            "calls_through_us": sum(test.get("served", 0) for test in self.tests.values()), "tests": self.tests,
        }  # fmt: skip

    def write(self) -> None:
        """After each test, so that a run that is cut off leaves what it had."""
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test_kda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--built-in", action="store_true")
    parser.add_argument("--longest", type=int, default=1 << 30, help="leave out longer prefills that are added here")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=int, default=600, help="seconds after which every process ends")
    options = parser.parse_args()

    run = Run(options)
    # Daemons: a process that even its own alarm does not end, inside a driver say, does not hold this one.
    threads = [threading.Thread(target=run.follow, args=(share,), daemon=True) for share in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, run.started + options.limit + 10 - time.monotonic()))
    with run.lock:
        run.write()
        record = run.record()
    if not run.tests:
        print(f"no process has chosen tests from {options.test_kda} within {options.limit} s; why: above")
        return 1
    print(
        f"FLA {record['fla']}: {record['outcomes']}; {record['passed_through_us']} passed through {record['backend']}, "
        f"{record['calls_through_us']} calls of chunk_kda"
    )
    return 0 if record["outcomes"].keys() <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
