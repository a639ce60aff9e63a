"""These tests work on tiny tensors, for which several threads only wait for one another."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)
