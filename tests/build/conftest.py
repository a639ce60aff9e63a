"""Fixtures for the tests of tools/. They use the real toolchain (from the cache, else pip) and never the tree's own build folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("tools") is None:
    # At the end: an installed flash_kda comes before the one in the tree.
    sys.path.append(str(REPOSITORY))

from tools import settings, toolchain  # noqa: E402

# The cache as it was before any test, so that real downloads happen at most once.
REAL_CACHE = str(settings.cache_root())


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not decide a test; the cache and the source of the toolchain may stay."""
    for name in settings.VARIABLES:
        if name not in (settings.CACHE_DIR, settings.TOOLCHAIN_DIR):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def real_toolchain() -> toolchain.Toolchain:
    return toolchain.obtain((toolchain.DEVICE, toolchain.HOST))


@pytest.fixture
def command(tree: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs `python -m tools ARGUMENT...` in the copied tree."""

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, settings.CACHE_DIR: REAL_CACHE, **variables}
        return subprocess.run(
            [sys.executable, "-m", "tools", *arguments],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
