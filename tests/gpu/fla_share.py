"""A share of FLA's forward tests of KDA, in a process that ``fla_suite.py`` starts. Prints a line of JSON for each event; what pytest
says goes to stderr.

    python fla_share.py TEST_KDA --share I --processes N --limit SECONDS --longest TOKENS [--built-in]

The first event is ``{"chosen": [names of all shares' tests], "about": {versions, GPU, machine code}}``; then there is one for each test
that ended.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

FORWARD = (
    "test_chunk_varlen_prefill", "test_chunk_return_intermediate_states", "test_flash_kda_chunk", "test_flash_kda_chunk_varlen",
)  # fmt: skip
# Parameters of test_chunk_varlen_prefill that are served here: probability of a decay of exp(-1000), offsets, gate, safe gate.
PREFILL = (
    (0.1, [0, 8192], True, False),
    (0.9, [0, 256, 500, 1000], True, False),
    (0.5, [0, 256, 500, 1000], False, False),
    (0.0, [0, 15, 100, 300, 1200, 2000], True, False),
    (0.0, [0, 100, 300, 1200, 3000, 4096], False, True),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("test_kda")
    for name in ("share", "processes", "limit", "longest"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--built-in", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = arguments()
    signal.alarm(OPTIONS.limit)  # ends this process, whatever it does then: importing, compiling, waiting for the GPU
    sys.modules["transformers"] = None  # type: ignore[assignment]  # FLA's models would import it, and none is needed

import pytest  # noqa: E402
import torch  # noqa: E402

import flash_kda  # noqa: E402


class Share:
    """A pytest plugin: chooses the tests, and tells of each its outcome and which backend its calls took."""

    def __init__(self, options: argparse.Namespace, events: Any) -> None:
        self.options, self.events = options, events
        self.calls = 0  # of flash_kda.fwd
        self.found: dict[str, Any] = {}  # by the test that runs

    def tell(self, **event: Any) -> None:
        print(json.dumps(event), file=self.events, flush=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        theirs = [item for item in items if item.originalname in FORWARD]
        prefill = [item for item in theirs if item.originalname == "test_chunk_varlen_prefill"]
        chosen = [item for item in theirs if item not in prefill]
        for mask_p, offsets, gate, safe in PREFILL if prefill else ():
            parameters = {
                "H": 4, "D": 128, "mask_p": mask_p, "cu_seqlens": offsets, "dtype": torch.bfloat16, "use_gate_in_kernel": gate,
                "safe_gate": safe, "disable_recompute": False,
            }  # fmt: skip
            if offsets[-1] <= self.options.longest:
                test = functools.partial(prefill[0].function, **parameters)
                name = f"test_chunk_varlen_prefill[bf16-D128-mask_p{mask_p}-cu_seqlens{offsets}-gate{gate}-safe_gate{safe}]"
                chosen.append(pytest.Function.from_parent(prefill[0].parent, name=name, callobj=test))
        chosen += prefill  # last: they are Triton's
        if not self.options.built_in:
            for module in {item.module for item in chosen}:
                module._flash_kda_run = functools.partial(run_registered, module)
        self.tell(chosen=[item.name for item in chosen], about=about())
        items[:] = chosen[self.options.share :: self.options.processes]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        before, calls = Counter(flash_kda.fla.counts), self.calls
        try:
            return (yield)
        finally:
            asked = Counter(flash_kda.fla.counts) - before
            served = asked.pop("served", 0)
            self.found = {"served": self.calls - calls if self.options.built_in else served, "declined": dict(asked)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        event = {
            "test": report.nodeid.split("::", 1)[1],
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
        }
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            event["reason"] = crash.message.splitlines()[0] if crash else str(report.longrepr)
        self.tell(**event, **self.found)
        self.found = {}


def about() -> dict[str, Any]:
    import triton
    from fla import __version__

    versions = {"fla": __version__, "torch": torch.__version__, "triton": triton.__version__}
    if not torch.cuda.is_available():
        return {**versions, "gpu": None}
    kernel, cubin, _ = flash_kda.device_code.choose(0)
    return {
        **versions, "gpu": torch.cuda.get_device_name(0), "kernel": kernel, "sha256": cubin.sha256 if cubin else None
    }  # fmt: skip


def run_registered(module: Any, monkeypatch: pytest.MonkeyPatch, positional: bool = False, **options: Any) -> Any:
    """FLA's helper of this name, without its expectation of what its own backend takes."""
    bound = inspect.signature(module.chunk_kda).bind(**options, **module._FLASH_KDA_REQUIRED_KWARGS)
    bound.apply_defaults()
    with torch.inference_mode():
        if positional:
            return module.chunk_kda(*bound.args, **bound.kwargs)
        return module.chunk_kda(**options, **module._FLASH_KDA_REQUIRED_KWARGS)


def main(options: argparse.Namespace) -> int:
    import autotuning

    share = Share(options, os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    torch.set_num_threads(1)  # the processes are as many as the cores
    autotuning.take_first()
    if options.built_in:
        fwd = flash_kda.fwd

        def counted(*arguments: Any, **named: Any) -> Any:
            share.calls += 1
            return fwd(*arguments, **named)

        flash_kda.fwd = counted
    else:
        flash_kda.fla.register()
    folder = str(Path(options.test_kda).resolve().parent)
    quiet = ["-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider"]
    alone = ["--rootdir", folder, "-c", os.devnull]  # no settings of a tree that the file happens to lie in
    return int(pytest.main([options.test_kda, *quiet, *alone], [share]))


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
