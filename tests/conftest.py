"""Shared by all tests: the source tree is importable, and so are the test helpers in tests/gpu."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# An installed flash_kda is tested as it is; only without one does the source tree step in.
if importlib.util.find_spec("flash_kda") is None:
    sys.path.insert(0, str(HERE.parent))
sys.path[:0] = [str(HERE / "gpu"), str(HERE / "cpu")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        metavar="FILE",
        help="GPU tests: write what ran, on what, with which errors and times, as JSON to FILE "
        "(a bare name means tests/gpu/records/NAME.json)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs a kernel on a GPU; skipped, visibly, where there is none")
