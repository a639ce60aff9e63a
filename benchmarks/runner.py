"""Runs paths over cases, each path in a process of its own, and keeps what is known so far in one file."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import PATHS

ROOT = Path(__file__).resolve().parent.parent
CASE_SECONDS = 90  # a case takes less than one; a peer's first call may compile for a minute

METHOD = (
    "Microseconds of the GPU between CUDA events, medians of 15 calls after 3. median_us: calls as they come, with what the one "
    "before left in the L2 cache; cold_us: the L2 cache is swept before each. floor_us: inputs, out and states moved once at "
    "floor_bandwidth bytes a second. err_out, err_state: ||x - x_fp64|| / ||x_fp64|| over 4 heads. q, k, v, beta ~ N(0, 1), "
    "g ~ N(0, 1) (strong) or N(-7, 1) (weak), A_log, dt_bias ~ U(0, 1), lower_bound -5, initial states ~ N(0, 1)."
)
KEY = ("seq_lens", "heads", "regime", "state", "path")

Case = dict[str, Any]
WORKER = (sys.executable, "-m", "benchmarks.worker")


class WorkerLost(Exception):
    """The process ended, or did not answer in time."""


class Results:
    """The content of a results file, written anew after each case: what was measured survives whatever comes later."""

    def __init__(self, target: Path, floor_bandwidth: float, earlier: Mapping[str, Any] | None = None) -> None:
        self.target = target
        self.content: dict[str, Any] = {
            "gpu": None,
            "driver": None,
            "torch": None,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "method": METHOD,
            "floor_bandwidth": floor_bandwidth,
            "paths": {},
            "rows": [],
            "failures": [],
        }
        if earlier is not None:
            self.content |= earlier

    def begin(self, path: str, about: Mapping[str, Any]) -> None:
        """Note what runs ``path``. Its earlier rows stay if it is the same code; another GPU or driver is refused."""
        about = dict(about)
        for field in ("gpu", "driver", "torch"):
            value = about.pop(field)
            if self.content[field] not in (None, value):
                raise ValueError(
                    f"{self.target} is of {field} {self.content[field]}, and this is {value}; write into another file"
                )
            self.content[field] = value
        if self.content["paths"].get(path, about) != about:
            for kind in ("rows", "failures"):
                self.content[kind] = [row for row in self.content[kind] if row["path"] != path]
        self.content["paths"][path] = about

    def add(self, case: Case, answer: Mapping[str, Any]) -> None:
        """Put a row or a failure in the place of what was known of the case."""
        key = {name: case[name] for name in KEY}
        for kind in ("rows", "failures"):
            self.content[kind] = [row for row in self.content[kind] if any(row[n] != key[n] for n in KEY)]
        if "row" in answer:
            self.content["rows"].append({**key, **answer["row"]})
        else:
            self.content["failures"].append({**key, "why": answer["failure"]})

    def add_not_run(self, case: Case, why: str) -> None:
        """Note a failure, unless a row of the case is there."""
        if not any(all(row[n] == case[n] for n in KEY) for row in self.content["rows"]):
            self.add(case, {"failure": why})

    def write(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.target.parent, delete=False) as file:
            file.write(to_json(self.content))
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.target)


def to_json(content: Mapping[str, Any]) -> str:
    """JSON with one row a line, so that versions of a file can be compared."""
    parts = []
    for name, value in content.items():
        if name in ("rows", "failures") and value:
            lines = ",\n".join(f"  {json.dumps(row)}" for row in value)
            parts.append(f' "{name}": [\n{lines}\n ]')
        else:
            parts.append(f' "{name}": ' + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def run(
    path: str,
    cases: Iterable[Case],
    results: Results,
    log: Callable[[str], None],
    worker: Sequence[str] = WORKER,
    case_seconds: float = CASE_SECONDS,
    limit: float | None = None,
) -> bool:
    """Measure a path on every case; whether all went well. That it cannot run at all is said, and in no row.

    ``limit``: seconds for all cases together, in place of those for each. What it leaves out is a failure that says so, unless the
    file holds an earlier row of the same code.
    """
    fine = True
    end = math.inf if limit is None else time.monotonic() + limit
    todo = [{**case, "path": path, "floor_bandwidth": results.content["floor_bandwidth"]} for case in cases]
    while todo:
        with _Worker(path, worker) as process:
            try:
                about = process.ask(case_seconds)["about"]
            except WorkerLost as why:
                log(f"{path}: cannot run: {why}")
                return False
            results.begin(path, about)
            lost = False
            while todo and not lost:
                left = case_seconds if limit is None else end - time.monotonic()
                if left <= 0:
                    for case in todo:
                        results.add_not_run(case, f"not run: the {limit:.0f} s for this path were over")
                    results.write()
                    log(f"{path}: {limit:.0f} s are over, {len(todo)} cases not run")
                    return False
                try:
                    answer = process.ask(left, todo[0])
                except WorkerLost as why:
                    answer, lost = {"failure": str(why)}, True
                results.add(todo[0], answer)
                results.write()
                log(_describe(todo.pop(0), answer))
                fine &= "row" in answer
    return fine


class _Worker:
    """One path's process, and its lines as they come."""

    def __init__(self, path: str, command: Sequence[str]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, path], cwd=ROOT, env={**os.environ, **PATHS[path].environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")  # the end

    def ask(self, seconds: float, case: Case | None = None) -> dict[str, Any]:
        """The answer to a case; without one, what the worker says of itself at its start."""
        if case is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its lines end then, too
                self.process.stdin.write(json.dumps(case) + "\n")
                self.process.stdin.flush()
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise WorkerLost(f"no answer in {seconds:.0f} s") from None
            if not line:
                self.process.wait()
                raise WorkerLost(f"the process ended: {self._last_words()}")
            if line.startswith("@"):  # what others print is not marked
                message: dict[str, Any] = json.loads(line[1:])
                return message

    def _last_words(self) -> str:
        self.errors.seek(0)
        said = [line for line in self.errors.read().splitlines() if line.strip()]
        return said[-1][:300] if said else "it said nothing"

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def _describe(case: Case, answer: Mapping[str, Any]) -> str:
    what = f"{case['path']:16}{case['seq_lens'][:36]:38}{case['heads']:>4}  {case['regime']:8}{case['state']:6}"
    if "failure" in answer:
        return f"{what}FAILED: {answer['failure']}"
    row = answer["row"]
    return f"{what}{row['median_us']:10.1f} us   floor {row['floor_us']:8.1f}   error {row['err_out']:.1e}"
