"""Shared by all tests: the source tree is importable, and so are the test helpers in tests/gpu."""

from __future__ import annotations

import importlib.util
import shutil
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources in another folder: no .git, nothing built."""
    made = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.so")

    def ignore(where: str, names: list[str]) -> set[str]:
        at_the_top = {"build", "dist"} if Path(where) == HERE.parent else set()
        return made(where, names) | at_the_top & set(names)

    folder = tmp_path / "tree"
    shutil.copytree(HERE.parent, folder, ignore=ignore)
    return folder
