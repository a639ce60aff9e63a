"""Triton without its search for the fastest configuration: each kernel takes the first that runs.

    python tests/gpu/autotuning.py PROGRAM [ARGUMENTS]

runs a program so. FLA's forward of KDA tries over a hundred configurations, each compiled and timed, which takes minutes where one of
each kernel takes seconds. A configuration is a choice of tiles, warps and stages: it changes how fast a kernel is, not what it computes.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEVER = float("inf")


def take_first() -> None:
    """For all kernels of this process. Configurations that do not fit the GPU are passed over, as Triton does."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, *arguments: Any) -> Any:  # called once before each search
        self._taken = False
        return prune(self, *arguments)

    def _bench(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        if self._taken:
            return [NEVER] * 3
        self.do_bench = run_once
        timings: list[float] = bench(self, *arguments, config=config, **meta)
        self._taken = timings[0] != NEVER
        return timings

    Autotuner.prune_configs, Autotuner._bench = prune_configs, _bench


def run_once(kernel: Callable[[], Any], quantiles: Any) -> list[float]:
    kernel()
    return [0.0] * len(quantiles)


if __name__ == "__main__":
    take_first()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
