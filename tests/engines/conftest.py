"""Releases of flash-linear-attention as the registry has them, each in a folder of its own, and what they need at import."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)  # tiny tensors, for which several threads only wait for one another

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
if importlib.util.find_spec("tools") is None:
    # At the end: an installed flash_kda comes before the one in the tree.
    sys.path.append(str(REPOSITORY))


# FLA 0.5 cannot be imported with Triton 3.9, and torch may bring a Triton of any age.
TRITON = "triton==3.6.0"


def unpacked(name: str, requirements: list[str], key: str) -> Path:
    """What pip unpacks for these requirements, without what they depend on; kept in the cache by a digest of the key."""
    from tools import settings
    from tools.process import capture
    from tools.toolchain import exclusive, pip_command

    folder = settings.cache_root() / "tests" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / ".lock", lambda _: None):
        if not folder.exists():
            fresh = folder.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(fresh)]
            done = capture([*pip_command(), "install", *options, *requirements])
            assert done.returncode == 0, done.stdout + done.stderr
            fresh.rename(folder)
    return folder


def path_of(version: str) -> list[str]:
    """A release of FLA, and a Triton that all releases can import."""
    requirements = HERE / f"fla-{version}.txt"
    fla = unpacked(f"fla-{version}", ["--require-hashes", "-r", str(requirements)], requirements.read_text())
    return [str(fla), str(unpacked("triton", [TRITON], f"{TRITON} {sys.implementation.cache_tag}"))]


@pytest.fixture(scope="session")
def with_fla() -> Any:
    """Runs a program in a process that imports a release of FLA and the flash_kda under test, to an exit status; its output."""
    pytest.importorskip("torch")
    import flash_kda

    def run(version: str, program: Path, *arguments: str, status: int = 0) -> str:
        path = [*path_of(version), str(Path(flash_kda.__file__).resolve().parents[1])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        variables.pop("FLA_FLASH_KDA", None)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(program), *arguments],
            capture_output=True, text=True, check=False, env=variables, cwd=HERE,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def fla_session(with_fla: Any) -> Any:
    """Runs tests/gpu/fla_session.py once for a release and options; what it found, as a dict."""
    known: dict[tuple[str, ...], Any] = {}

    def session(version: str, *options: str) -> Any:
        key = (version, *options)
        if key not in known:
            known[key] = json.loads(with_fla(version, HERE.parent / "gpu" / "fla_session.py", *options))
            assert known[key]["version"] == version
            assert "not importable" not in known[key], known[key]["not importable"]
        return known[key]

    return session
