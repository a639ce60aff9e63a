"""``benchmarks`` is a folder of the source tree and in no wheel. Last on the path: an installed flash_kda goes before the tree's."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)
