"""The wheel in containers: on an old and a newer glibc, with no GPU, driver, compiler, network or torch; and built by cibuildwheel."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import standins
import wheel_matrix
from proof import Table, assert_same

from tools import ROOT, locks, settings
from tools.matrix import MATRIX
from tools.process import capture
from tools.toolchain import pip_command

pytestmark = pytest.mark.skipif(bool(standins.missing()), reason=standins.missing() or "containers can be run")

# What a user of an image gets who trusts it with nothing.
LOCKED_UP = ("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=1000:1000")


def installed(wheel: Path, folder: Path, python: str) -> Path:
    """What pip puts into site-packages for that Python; pip itself judges whether the tag fits a system with glibc 2.17."""
    options = [
        "--no-deps",
        "--quiet",
        "--no-index",
        "--only-binary=:all:",
        "--platform",
        f"manylinux_2_17_{os.uname().machine}",
    ]
    result = capture(
        [*pip_command(), "install", *options, "--python-version", python, "--target", str(folder), str(wheel)]
    )
    assert result.returncode == 0, result.stderr
    return folder


def say(image: str, site: Path) -> "dict[str, object]":
    """What tests/distribution/installed.py prints in a container of `image`."""
    volumes = (f"--volume={site}:/site:ro", f"--volume={ROOT / 'tests/distribution/installed.py'}:/installed.py:ro")
    command = (
        "podman",
        "run",
        "--rm",
        *LOCKED_UP,
        *volumes,
        "--env=PYTHONPATH=/site",
        image,
        "python3",
        "/installed.py",
    )
    found: dict[str, object] = json.loads(standins.run(*command))
    return found


def check(found: "dict[str, object]", glibc: str, python: str) -> None:
    assert found["glibc"] == f"glibc {glibc}"
    assert str(found["python"]).startswith(f"{python}.")
    assert found["cubins"] == {key: cubin["sha256"] for key, cubin in locks.read_device_code_lock().items()}
    assert found["available"] is False
    assert str(found["reason"]).startswith("no CUDA driver: the NVIDIA driver library libcuda.so.1 cannot be opened")
    assert "needs torch >= 2.4, which is not installed" in str(found["needs_torch"])


def test_glibc_2_31(project: Path, tmp_path: Path, proof: Table) -> None:
    """Built in a container of Debian 11 that has neither network nor compiler, by its own Python 3.9, then imported in another."""
    script = "import pathlib; from tools import wheels; wheels.release('all', pathlib.Path('out'))"
    volumes = (f"--volume={project}:/src", f"--volume={settings.cache_root()}:/cache")
    image = standins.debian("bullseye", "python3-dev", "python3-distutils")
    log = standins.run(
        "podman",
        "run",
        "--rm",
        "--network=none",
        *volumes,
        "--env=FLASH_KDA_CACHE_DIR=/cache",
        "--workdir=/src",
        image,
        "python3",
        "-c",
        script,
    )
    assert "downloading" not in log
    (wheel,) = (project / "out").glob("flash_kda-*-cp39-*.whl")
    proof.add("source, Debian 11, Python 3.9", wheel)
    site = installed(wheel, tmp_path / "site", "3.9")
    check(say(image, site), "2.31", "3.9")


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the wheel under test is not for Python 3.11, which Debian 12 has"
)
def test_a_newer_glibc(wheel_path: Path, tmp_path: Path) -> None:
    check(say(standins.debian("bookworm", "python3"), installed(wheel_path, tmp_path / "site", "3.11")), "2.36", "3.11")


@pytest.mark.skipif(
    shutil.which("cibuildwheel", path=os.fspath(Path(sys.executable).parent)) is None,
    reason="cibuildwheel needs Python 3.11",
)
def test_cibuildwheel(project: Path, wheel_path: Path, tmp_path: Path, proof: Table) -> None:
    """The configuration of pyproject.toml, on a local stand-in for the manylinux image. FLASH_KDA_TEST_PYTHONS=all takes every Python."""
    image, have = standins.manylinux(MATRIX.pythons)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    chosen = have if os.environ.get("FLASH_KDA_TEST_PYTHONS") == "all" else [v for v in have if v in ("3.14", own)]
    log = wheel_matrix.build(project, image, chosen, tmp_path)
    made = {re.search(r"-cp(3\d+)-", path.name)[1]: path for path in tmp_path.glob("*.whl")}  # type: ignore[index]
    assert set(made) == {version.replace(".", "") for version in chosen}
    for version, path in made.items():
        proof.add(f"cibuildwheel, cp{version}", path)
    assert log.count('"needs_torch": "flash_kda.fwd needs torch') == len(chosen), "the test command ran for each"
    if own.replace(".", "") in made:
        assert_same(wheel_path, made[own.replace(".", "")])
