"""Wheels per setting, wheels for another machine, and the static index that plain pip installs them from."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import standins
from proof import Table

from flash_kda import elf, verify
from tools import ROOT, locks, settings, wheels
from tools.errors import BuildError
from tools.process import capture
from tools.toolchain import Toolchain
from tools.venvs import Environment

OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]


@pytest.fixture(scope="session")
def hopper_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for FLASH_KDA_CUDA_ARCHS=90a."""
    return wheels.release("90a", tmp_path_factory.mktemp("hopper"))


@pytest.fixture(scope="session")
def other_machine_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for the machine that this one is not, built across."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.MACHINE, OTHER)
        return wheels.release("all", tmp_path_factory.mktemp("across"))


@pytest.fixture(scope="session")
def index(
    wheel_path: Path, hopper_wheel: Path, other_machine_wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of a server of the index of these wheels, as any static web server would serve it."""
    folder = tmp_path_factory.mktemp("index")
    made = wheels.write_index([wheel_path, hopper_wheel, other_machine_wheel], folder)
    assert [path.name for path in made] == ["simple", "sm90a"]

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def install(index: str, name: str, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """pip install from that index alone: no configuration of this machine, no other place to find wheels."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--no-deps", "--no-cache-dir", "--quiet"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return capture(
        [*command, "--index-url", f"{index}/{name}/", "--target", str(folder), *options, "flash_kda"], env=environment
    )


@pytest.mark.parametrize(("name", "version", "archs"), [("simple", "0.1.0", None), ("sm90a", "0.1.0+sm90a", {"90a"})])
def test_pip_installs_from_the_index(
    index: str, name: str, version: str, archs: "set[str] | None", tmp_path: Path
) -> None:
    result = install(index, name, tmp_path / "site")
    assert result.returncode == 0, result.stderr
    say = "import flash_kda; from flash_kda import device_code as d; print(flash_kda.__version__, *[c.unit + '/' + c.arch + '=' + c.sha256 for c in d.embedded()])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found, *cubins = capture([sys.executable, "-S", "-c", say], cwd=tmp_path, env=environment).stdout.split()
    assert found == version
    locked = {key: cubin["sha256"] for key, cubin in locks.read_device_code_lock().items()}
    assert dict(cubin.split("=") for cubin in cubins) == {
        key: digest for key, digest in locked.items() if archs is None or key.split("/")[1] in archs
    }


def test_pip_refuses_a_wheel_that_is_not_the_one_of_the_index(index: str, wheel_path: Path, tmp_path: Path) -> None:
    """The hash in the link is what is compared: the file is changed behind it."""
    wheels.write_index([wheel_path], tmp_path / "index")
    stored = tmp_path / "index" / "wheels" / wheel_path.name
    stored.write_bytes(stored.read_bytes() + b"\0")
    result = install((tmp_path / "index").as_uri(), "simple", tmp_path / "site")
    assert result.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in result.stderr


def test_an_unfit_wheel_is_not_put_into_an_index(wheel_path: Path, tmp_path: Path) -> None:
    renamed = tmp_path / wheel_path.name.replace("flash_kda-0.1.0", "flash_kda-0.1.0+sm90a")
    renamed.write_bytes(wheel_path.read_bytes())
    with pytest.raises(BuildError, match=r"name: the file says flash_kda 0.1.0"):
        wheels.write_index([renamed], tmp_path / "index")


def test_what_is_no_wheel_is_refused_in_one_line(tmp_path: Path) -> None:
    result = capture([sys.executable, "-m", "tools", "index", "README.md", "--out", str(tmp_path / "index")], cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.startswith("error: README.md is not named as a wheel: expected NAME-VERSION-")
    assert result.stderr.count("\n") == 1


def test_a_wheel_of_one_setting_says_so_in_its_version(hopper_wheel: Path) -> None:
    report = verify.verify(hopper_wheel, ROOT / "device-code.lock")
    assert hopper_wheel.name.startswith("flash_kda-0.1.0+sm90a-")
    assert {code.arch for code in report.code} == {"90a"}
    assert {code.status for code in report.code} == {"as in the lock"}
    assert report.faults == []


def test_the_wheel_of_the_other_machine_has_the_same_machine_code(
    wheel_path: Path, other_machine_wheel: Path, full_toolchain: Toolchain, proof: Table
) -> None:
    proof.add(f"source, across for {OTHER}", other_machine_wheel)
    ours, theirs = (verify.verify(path, ROOT / "device-code.lock") for path in (wheel_path, other_machine_wheel))
    assert [code[1:] for code in theirs.code] == [code[1:] for code in ours.code]
    assert theirs.faults == []
    wheel = verify.read_wheel(other_machine_wheel)
    library = elf.Library(wheel.members[wheel.modules[0]])
    assert library.machine == OTHER
    assert library.glibc <= (2, 17)
    assert wheel.modules[0].endswith(f"-{OTHER}-linux-gnu.so")
    path = os.pathsep.join(map(str, full_toolchain.python_path))
    shown = capture(
        [sys.executable, "-S", "-m", "auditwheel", "show", str(other_machine_wheel)],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert f'"manylinux_2_17_{OTHER}"' in " ".join(shown.stdout.split()), shown.stdout + shown.stderr


def test_the_aarch64_wheel_is_imported_under_emulation(other_machine_wheel: Path, tmp_path: Path) -> None:
    reason = standins.missing()
    if reason or OTHER != "aarch64" or sys.version_info[:2] != (3, 11):
        pytest.skip(reason or "runs on x86_64 with Python 3.11, the Python of Debian 12")
    root = standins.foreign_python("arm64", "bookworm", "python3.11")
    with zipfile.ZipFile(other_machine_wheel) as archive:
        archive.extractall(tmp_path / "site")
    command = [
        "qemu-aarch64-static",
        "-L",
        str(root),
        str(root / "usr/bin/python3.11"),
        "-S",
        str(ROOT / "tests/distribution/installed.py"),
    ]
    result = capture(command, env={"PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"})
    assert result.returncode == 0, result.stderr
    assert '"machine": "aarch64"' in result.stdout
    for cubin in locks.read_device_code_lock().values():
        assert cubin["sha256"] in result.stdout
    assert "libcuda.so.1 cannot be opened" in result.stdout


def test_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.MACHINE, "riscv64")
    with pytest.raises(BuildError, match=r"for x86_64 and aarch64, not for riscv64 \(FLASH_KDA_MACHINE\)"):
        settings.machine()


def test_an_environment_that_installs_offline(wheel_path: Path, tmp_path: Path) -> None:
    """A folder of wheels is a mirror: pip install --no-index --find-links."""
    environment = Environment(tmp_path / "venv")
    environment.install("--no-index", "--find-links", str(wheel_path.parent), "--no-deps", "flash_kda")
    assert (
        capture([str(environment.python), "-m", "flash_kda", "archs"], cwd=tmp_path, env=environment.clean()).returncode
        == 0
    )
