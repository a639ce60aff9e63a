"""Wheels rebuilt elsewhere are the same, and would be seen not to be: planted differences are found and explained."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from proof import Table, assert_same

from tools import settings, toolchain
from tools.process import capture

RELEASE = (
    "import sys; from pathlib import Path; from tools import wheels; wheels.release(sys.argv[1], Path(sys.argv[2]))"
)


def release(folder: Path, setting: str, output: Path) -> "subprocess.CompletedProcess[str]":
    return capture([sys.executable, "-c", RELEASE, setting, str(output)], cwd=folder)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has changed; plant the fault elsewhere"
    path.write_text(text.replace(old, new))


def test_the_wheel_under_test(wheel_path: Path, proof: Table) -> None:
    proof.add("source, python3 -m tools", wheel_path)


DOC = 'm.doc() = "CUDA kernels'


def test_a_planted_time_is_found(project: Path, tmp_path: Path) -> None:
    """The compiler refuses it. Were that silenced, it would take SOURCE_DATE_EPOCH for the time."""
    replace(project / "csrc" / "bindings.cpp", DOC, 'm.doc() = __TIME__ " CUDA kernels')
    result = release(project, "all", tmp_path / "out")
    assert result.returncode != 0
    assert "expansion of date or time macro is not reproducible" in result.stderr


def test_a_planted_path_is_found(project: Path, tmp_path: Path) -> None:
    replace(project / "csrc" / "bindings.cpp", DOC, 'm.doc() = __FILE__ " CUDA kernels')
    replace(project / "tools" / "host.py", 'maps = [f"-ffile-prefix-map', 'maps = [] and [f"-ffile-prefix-map')
    result = release(project, "all", tmp_path / "out")
    assert result.returncode != 0
    assert f"holds the path {project}/csrc/bindings.cpp" in result.stderr


def test_a_changed_flag_of_the_host_compiler_is_found(project: Path, wheel_path: Path, tmp_path: Path) -> None:
    replace(project / "tools" / "host.py", '"-O2",', '"-Os",')
    result = release(project, "all", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    with pytest.raises(AssertionError, match=r"sha256 .* and ") as found:
        assert_same(wheel_path, tmp_path / "out" / wheel_path.name)
    if shutil.which("diffoscope"):
        assert "_native.cpython-" in str(found.value), "the report says which file differs, and in what"


def test_a_changed_flag_of_the_device_compiler_is_found(project: Path, tmp_path: Path) -> None:
    replace(project / "tools" / "device.py", '    "-DNDEBUG",\n', '    "-DNDEBUG",\n    "--ftz=true",\n')
    result = release(project, "90a", tmp_path / "out")
    assert result.returncode != 0
    assert re.search(r"device code differs from device-code.lock \(.*sm90/90a: .*sha256 \w+ -> \w+", result.stderr), (
        result.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or not Path("/usr/include/python3.11/Python.h").exists(),
    reason="builds with Debian 12's Python",
)
def test_the_same_wheel_for_another_user(project: Path, wheel_path: Path, tmp_path: Path) -> None:
    """Who owns nothing here, has another home, umask, time zone and Python of the same version, and unpacks a toolchain of his own."""
    wheels, home = tmp_path / "wheels", tmp_path / "home"
    toolchain.fetch_all(wheels, lambda line: None)
    home.mkdir()
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_mode & 0o001 == 0 and str(path).startswith("/tmp/"):
            path.chmod(path.stat().st_mode | 0o011)
    capture(["chown", "-R", "65534:65534", str(project), str(home)])
    environment = {"PATH": os.defpath, "HOME": str(home), "TZ": "Asia/Tokyo", settings.TOOLCHAIN_DIR: str(wheels)}
    result = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", RELEASE, "all", str(home / "out")],
        cwd=project, env=environment, user=65534, group=65534, extra_groups=[], umask=0o077, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert_same(wheel_path, home / "out" / wheel_path.name)


def test_a_table_with_another_digest_is_refused() -> None:
    table = Table()
    with pytest.raises(AssertionError):
        table.add_cubins("a route", {"sm90/90a": "0" * 64})
    with pytest.raises(AssertionError, match="proves nothing"):
        table.add_cubins("a route", {})
    assert table.routes == {}
