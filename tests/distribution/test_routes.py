"""The routes to an installation: sdist, pip in build isolation, editable; in other folders, for other users; the same bytes."""

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from proof import Table, assert_same

from tools import ROOT, settings
from tools.embed import project_version
from tools.process import capture
from tools.toolchain import Toolchain, pip_command
from tools.venvs import Environment

# A git that leaves a trace: no route may call it.
GIT = '#!/bin/sh\necho "$@" >> "$FLASH_KDA_TEST_GIT_TRACE"\nexit 1\n'


@pytest.fixture(scope="module")
def sdist(full_toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they are published, made with the pinned backend."""
    output = tmp_path_factory.mktemp("sdist")
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    path = os.pathsep.join(map(str, full_toolchain.python_path))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-S", "-c", script, str(output)], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    return next(output.glob("flash_kda-*.tar.gz"))


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return next(folder.iterdir())


@pytest.fixture
def other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another user's surroundings: umask 077, another time zone and locale, a git that must not be called; its trace."""
    trace, programs = tmp_path / "git-was-called", tmp_path / "programs"
    programs.mkdir()
    (programs / "git").write_text(GIT)
    (programs / "git").chmod(0o755)
    for name in settings.VARIABLES:
        if name not in (settings.CACHE_DIR, settings.TOOLCHAIN_DIR):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FLASH_KDA_TEST_GIT_TRACE", str(trace))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    before = os.umask(0o077)
    yield trace
    os.umask(before)


def test_the_sdist_holds_what_a_build_needs(sdist: Path, tmp_path: Path) -> None:
    folder = unpack(sdist, tmp_path)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    needed = {"toolchain.lock", "device-code.lock", "setup.py", "pyproject.toml", "LICENSE", "README.md", ".ci/run"}
    for pattern in ("csrc/**/*", "tools/*.py", "flash_kda/*.py", "licenses/*", "tests/**/*.py"):
        needed |= {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file()}
    assert sorted(needed - names) == []
    assert [name for name in names if name.endswith((".so", ".pyc", ".cubin"))] == []


def test_the_same_wheel_from_the_sdist_in_another_folder_for_another_user(
    sdist: Path, wheel_path: Path, other_user: Path, tmp_path: Path, proof: Table
) -> None:
    """Nothing is shared but the toolchain: cubins and module are compiled again. Before and after repair, bit for bit."""
    folder = unpack(sdist, tmp_path / "a folder with a space")
    # What earlier builds may have left: a module that was since deleted, and an in-place module of another Python.
    library = folder / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "flash_kda"
    library.mkdir(parents=True)
    (library / "deleted.py").write_text("raise ImportError\n")
    (folder / "flash_kda" / "_native.cpython-38-x86_64-linux-gnu.so").write_bytes(b"old")
    script = "import sys; from pathlib import Path; from tools import wheels; wheels.release('all', Path(sys.argv[1]))"
    result = capture([sys.executable, "-c", script, str(tmp_path / "out")], cwd=folder)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "kept from before" not in result.stdout
    made = next((tmp_path / "out").glob("*.whl"))
    assert made.name == wheel_path.name
    assert_same(wheel_path, made)
    assert not other_user.exists(), "the build called git"
    proof.add("sdist, python3 -m tools", made)


def pip(*arguments: str, cwd: Path) -> None:
    command = [*pip_command(), *arguments, "--disable-pip-version-check"]
    result = capture(command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr


def raw_wheel() -> Path:
    """The wheel under test as it was before repair, rebuilt if it is not there any more."""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    name = f"flash_kda-{project_version()}-{python}-{python}-linux_{os.uname().machine}.whl"
    return ROOT / "build" / "wheel" / name


def test_pip_wheel_in_build_isolation_gives_the_same_bytes(
    wheel_path: Path,
    sdist: Path,
    other_user: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    proof: Table,
) -> None:
    monkeypatch.setenv(settings.CUDA_ARCHS, "all")
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "out"), str(sdist), cwd=tmp_path)
    made = next((tmp_path / "out").glob("*.whl"))
    assert_same(raw_wheel(), made)
    proof.add("sdist, pip wheel", made)
    assert not other_user.exists(), "the build called git"


def test_an_editable_installation(
    sdist: Path, other_user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip install -e, in isolation and for one architecture only; then the sources are what is imported."""
    monkeypatch.setenv(settings.CUDA_ARCHS, "90a")
    folder = unpack(sdist, tmp_path / "source")
    environment = Environment(tmp_path / "venv")
    environment.install("--no-deps", "-e", str(folder))
    say = "import flash_kda._native as n; print(n.__file__); print(sorted({c['arch'] for c in n.embedded()}))"
    result = capture([str(environment.python), "-c", say], cwd=tmp_path, env=environment.clean())
    assert result.returncode == 0, result.stderr
    place, archs = result.stdout.splitlines()
    assert Path(place).parent == folder / "flash_kda"
    assert archs == "['90a']"
    assert not other_user.exists(), "the build called git"
