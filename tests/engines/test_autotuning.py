"""tests/gpu/autotuning.py with Triton's own autotuner, on a kernel that only notes how it was called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

PROGRAM = """
import sys
import torch
import triton
from triton.runtime.errors import OutOfResources

launched = []

def kernel(x, n, SIZE):
    pass

class Kernel:
    fn = staticmethod(kernel)
    __name__ = "kernel"

    def run(self, x, n, SIZE, **options):
        launched.append((n, SIZE))
        if SIZE > 64:
            raise OutOfResources(SIZE, 64, "shared memory")

configs = [triton.Config({"SIZE": size}) for size in (128, 64, 32, 16)]
tuned = triton.runtime.autotuner.Autotuner(Kernel(), ["x", "n", "SIZE"], configs, ["n"], None, None)
for n in (1, 1, 2):
    tuned.run(torch.zeros(1), n)
assert tuned.best_config.kwargs == {"SIZE": 64}
assert launched == [(1, 128), (1, 64), (1, 64), (1, 64), (2, 128), (2, 64), (2, 64)], launched

everything_fails = triton.runtime.autotuner.Autotuner(Kernel(), ["x", "n", "SIZE"], configs[:1] * 2, ["n"], None, None)
try:
    everything_fails.run(torch.zeros(1), 1)
except OutOfResources:
    print(*sys.argv[1:])
"""


def test_the_first_configuration_that_runs_is_taken(with_fla: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert (
        with_fla("0.6.0", HERE.parent / "gpu" / "autotuning.py", str(program), "its", "arguments") == "its arguments\n"
    )
