"""FLA's own forward tests of KDA through ``flash_kda.fla``: which pass, and how many calls of ``chunk_kda`` ran here.

    python tests/gpu/fla_suite.py TEST_KDA [--out FILE] [--built-in]

TEST_KDA is tests/ops/test_kda.py of the flash-linear-attention repository, of the release that is on the path; no package holds it.
Its tests of training (all others) need gradients and are left out. The prefill test is also run with bf16 inputs of head dimension 128:
with FLA's own parameters, in fp16 or of other head dimensions, it stays with Triton. ``--built-in`` runs FLA's own backend for this
package instead, without ``register()``.

FLA's tests of its own backend also assert that some calls never reach ``flash_kda.fwd``. With ``register()`` they do, by intention:
that one assertion is left out.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_kda

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


class Suite:
    """A pytest plugin: chooses the tests, and notes for each its outcome and which backend its calls took."""

    def __init__(self, built_in: bool, longest: int) -> None:
        self.built_in, self.longest = built_in, longest
        self.tests: dict[str, dict[str, Any]] = {}
        self.calls = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if getattr(item, "originalname", item.name) in FORWARD]
        prefill = next((item for item in chosen if item.originalname == "test_chunk_varlen_prefill"), None)  # type: ignore[attr-defined]
        if prefill is not None:
            for mask_p, offsets, gate, safe in PREFILL:
                options = {
                    "H": 4, "D": 128, "mask_p": mask_p, "cu_seqlens": offsets, "dtype": torch.bfloat16, "use_gate_in_kernel": gate,
                    "safe_gate": safe, "disable_recompute": False,
                }  # fmt: skip
                if offsets[-1] <= self.longest:
                    test = functools.partial(prefill.function, **options)  # type: ignore[attr-defined]
                    name = f"test_chunk_varlen_prefill[bf16-D128-mask_p{mask_p}-cu_seqlens{offsets}-gate{gate}-safe_gate{safe}]"
                    chosen.append(pytest.Function.from_parent(prefill.parent, name=name, callobj=test))
        if not self.built_in:
            for module in {item.module for item in chosen}:  # type: ignore[attr-defined]
                module._flash_kda_run = functools.partial(run_registered, module)
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before, calls = Counter(flash_kda.fla.counts), self.calls
        try:
            return (yield)
        finally:
            what = Counter(flash_kda.fla.counts) - before
            test = self.tests.setdefault(item.name, {})
            test["served"] = self.calls - calls if self.built_in else what.pop("served", 0)
            test["declined"] = dict(what)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("::", 1)[1]
        if report.when == "call" or report.outcome != "passed":
            self.tests.setdefault(name, {})["outcome"] = report.outcome


def run_registered(module: Any, monkeypatch: pytest.MonkeyPatch, positional: bool = False, **options: Any) -> Any:
    """FLA's helper of this name, without its expectation of what its own backend takes."""
    bound = inspect.signature(module.chunk_kda).bind(**options, **module._FLASH_KDA_REQUIRED_KWARGS)
    bound.apply_defaults()
    with torch.inference_mode():
        if positional:
            return module.chunk_kda(*bound.args, **bound.kwargs)
        return module.chunk_kda(**options, **module._FLASH_KDA_REQUIRED_KWARGS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test_kda")
    parser.add_argument("--out")
    parser.add_argument("--built-in", action="store_true")
    parser.add_argument("--longest", type=int, default=1 << 30, help="leave out longer prefills")
    options = parser.parse_args()

    from fla import __version__

    suite = Suite(options.built_in, options.longest)
    if options.built_in:
        fwd = flash_kda.fwd

        def counted(*arguments: Any, **named: Any) -> Any:
            suite.calls += 1
            return fwd(*arguments, **named)

        flash_kda.fwd = counted
    else:
        flash_kda.fla.register()
    status = pytest.main(
        [options.test_kda, "-q", "-p", "no:cacheprovider", "--rootdir", str(Path(options.test_kda).parent)], [suite]
    )

    outcomes = Counter(test.get("outcome") for test in suite.tests.values())
    through = [name for name, test in suite.tests.items() if test.get("served") and test["outcome"] == "passed"]
    served = sum(test.get("served", 0) for test in suite.tests.values())
    record = {
        "fla": __version__, "torch": torch.__version__, "backend": "FLA's own" if options.built_in else "flash_kda.fla",
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "outcomes": dict(outcomes), "passed_through_us": len(through), "calls_through_us": served, "tests": suite.tests,
    }  # fmt: skip
    print(
        f"FLA {__version__}: {dict(outcomes)}; {len(through)} passed through {record['backend']}, {served} calls of chunk_kda"
    )
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
