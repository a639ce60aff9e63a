"""Obtaining the toolchain, from each source and with each thing that goes wrong; every case is made for real with small wheels."""

import errno
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Callable

import pytest

from tools import settings, toolchain
from tools.errors import BuildError
from tools.locks import Pin
from tools.toolchain import DEVICE, Contents, is_whole, obtain

FORK = multiprocessing.get_context("fork")
PAYLOAD = os.urandom(200_000)


def make_wheel(folder: Path, name: str, payload: bytes = PAYLOAD, platform: str = "any") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-{platform}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/bin/tool", payload)
        archive.writestr(f"{name}/lib/part", b"part")
        archive.writestr(f"{name}/left_out", b"not for us")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{platform}\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def pin(wheel: Path) -> Pin:
    name = wheel.name.split("-")[0]
    return Pin(name, "1.0", (hashlib.sha256(wheel.read_bytes()).hexdigest(),))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Let the build want these pins, from a cache of its own; returns where they will be unpacked."""

    def configure(*pins: Pin) -> Path:
        contents = {
            p.name: Contents((DEVICE,), 1, (f"{p.name}/bin/", f"{p.name}/lib/"), (f"{p.name}/bin/tool",)) for p in pins
        }
        monkeypatch.setattr(toolchain, "CONTENTS", contents)
        monkeypatch.setattr(toolchain, "read_toolchain_lock", lambda: {p.name: p for p in pins})
        monkeypatch.setattr(toolchain, "toolchain_digest", lambda: "d" * 64)
        monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "cache"))
        monkeypatch.delenv(settings.TOOLCHAIN_DIR, raising=False)
        # pip must not look anywhere but where a test says.
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        return tmp_path / "cache" / f"toolchain-{'d' * 16}"

    return configure


def leftovers(store: Path) -> list[Path]:
    return list(store.glob(".part-*"))


def test_a_folder_of_wheels_is_enough(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    store = use(pin(wheel))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(wheel.parent))
    monkeypatch.setattr(toolchain, "pip_command", lambda: pytest.fail("pip was called"))
    got = obtain((DEVICE,))
    tool = got.folders["alpha"] / "alpha/bin/tool"
    assert tool.read_bytes() == PAYLOAD
    assert os.access(tool, os.X_OK)
    assert not (got.folders["alpha"] / "alpha/left_out").exists()
    assert got.folders["alpha"].parent == store
    assert leftovers(store) == []


def test_a_download_with_pip_and_the_users_configuration(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "mirror", "alpha")
    use(pin(wheel))
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nfind-links = {wheel.parent}\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    lines: list[str] = []
    got = obtain((DEVICE,), lines.append)
    assert is_whole(got.folders["alpha"])
    assert lines == ["toolchain [1/1] alpha 1.0: downloading"]
    shutil.rmtree(wheel.parent)
    assert obtain((DEVICE,), lines.append) == got, "the cache is enough now"
    assert len(lines) == 1


@pytest.mark.parametrize("source", ["folder", "pip"])
def test_a_wrong_hash_stops_with_the_name_of_the_file(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    right = pin(wheel)
    store = use(right)
    wheel.write_bytes(wheel.read_bytes() + b"!")
    monkeypatch.setenv(settings.TOOLCHAIN_DIR if source == "folder" else "PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(BuildError, match=r"^wrong hash: .*alpha-1\.0-py3-none-any\.whl"):
        obtain((DEVICE,))
    assert not (store / right.folder).exists()
    make_wheel(tmp_path / "wheels", "alpha")
    use(pin(wheel))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(wheel.parent))
    assert is_whole(obtain((DEVICE,)).folders["alpha"]), "the cache must stay usable"


def test_we_hash_even_what_pip_let_through(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    use(pin(wheel))
    damaged = make_wheel(tmp_path / "damaged", "alpha", b"other")
    fake = tmp_path / "pip.py"
    fake.write_text(
        f"import shutil, sys\nif 'download' in sys.argv:\n shutil.copy({str(damaged)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    monkeypatch.setattr(toolchain, "pip_command", lambda: [sys.executable, str(fake)])
    with pytest.raises(BuildError, match=r"^wrong hash: alpha-1\.0-py3-none-any\.whl has sha256"):
        obtain((DEVICE,))


def test_no_network(use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = use(pin(make_wheel(tmp_path / "wheels", "alpha")))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(BuildError) as error:
        obtain((DEVICE,))
    assert str(error.value).startswith("cannot download alpha 1.0 with pip (ERROR: ")
    assert f"to build without network, name a folder of the wheels in {settings.TOOLCHAIN_DIR}" in str(error.value)
    assert leftovers(store) == []
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(tmp_path / "wheels"))
    assert is_whole(obtain((DEVICE,)).folders["alpha"])


def test_no_pip(use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(pin(make_wheel(tmp_path / "wheels", "alpha")))
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(
        BuildError, match=f"has no pip .* install pip, or name a folder of wheels in {settings.TOOLCHAIN_DIR}"
    ):
        obtain((DEVICE,))


def test_a_folder_that_is_not_there_or_lacks_a_wheel(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, beta = make_wheel(tmp_path / "wheels", "alpha"), make_wheel(tmp_path / "elsewhere", "beta")
    use(pin(alpha), pin(beta))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(tmp_path / "none"))
    with pytest.raises(BuildError, match="none is not a folder"):
        obtain((DEVICE,))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(alpha.parent))
    with pytest.raises(BuildError, match=r"has no beta-1\.0-\*\.whl"):
        obtain((DEVICE,))


def test_of_wheels_for_two_cpus_the_one_for_this_machine_is_taken(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (
        make_wheel(tmp_path / "wheels", "alpha", machine.encode(), f"manylinux_2_17_{machine}")
        for machine in (os.uname().machine, "riscv64")
    )
    use(Pin("alpha", "1.0", (*pin(here).hashes, *pin(there).hashes)))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(here.parent))
    assert (obtain((DEVICE,)).folders["alpha"] / "alpha/bin/tool").read_text() == os.uname().machine


def test_an_unwritable_cache(use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(pin(make_wheel(tmp_path / "wheels", "alpha")))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(tmp_path / "wheels"))
    # /sys refuses new folders to everybody, root included; a file in the way does so on any system.
    (tmp_path / "file").write_text("in the way")
    for place in ("/sys/flash_kda", str(tmp_path / "file" / "cache")):
        monkeypatch.setenv(settings.CACHE_DIR, place)
        with pytest.raises(BuildError) as error:
            obtain((DEVICE,))
        assert str(error.value).startswith(f"cannot use the toolchain cache {place}")
        assert f"set {settings.CACHE_DIR} to a writable folder" in str(error.value)


def test_a_full_disk_while_unpacking(use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = use(pin(make_wheel(tmp_path / "wheels", "alpha")))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(tmp_path / "wheels"))
    extract = zipfile.ZipFile.extract

    def full(self: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> str:
        if member.filename.endswith("part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return extract(self, member, path)

    with monkeypatch.context() as broken:
        broken.setattr(zipfile.ZipFile, "extract", full)
        with pytest.raises(BuildError, match=r"no space left on the disk.*700 MB free"):
            obtain((DEVICE,))
    assert leftovers(store) == []
    assert is_whole(obtain((DEVICE,)).folders["alpha"])


@pytest.fixture
def small_disk(tmp_path: Path) -> "object":
    """A file system of 256 KB, where the system lets us have one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root; the test before this one stands in for it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha", os.urandom(400_000))
    use(pin(wheel))
    monkeypatch.setenv(settings.CACHE_DIR, str(small_disk / "cache"))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(wheel.parent))
    with pytest.raises(BuildError, match="no space left on the disk"):
        obtain((DEVICE,))
    monkeypatch.delenv(settings.TOOLCHAIN_DIR)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(BuildError, match=r"cannot download alpha 1\.0: no space left on the disk"):
        obtain((DEVICE,))
    smaller = make_wheel(tmp_path / "smaller", "alpha", b"small")
    use(pin(smaller))
    monkeypatch.setenv(settings.CACHE_DIR, str(small_disk / "cache"))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(smaller.parent))
    assert is_whole(obtain((DEVICE,)).folders["alpha"])


def test_a_wheel_that_is_no_archive(use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    wheel.write_bytes(b"<html>please log in</html>")
    use(pin(wheel))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(wheel.parent))
    with pytest.raises(BuildError, match=r"alpha-1\.0-py3-none-any\.whl is not a readable wheel"):
        obtain((DEVICE,))


def die_while_unpacking() -> None:
    unpack = toolchain.unpack

    def die(wheel: Path, contents: Contents, folder: Path) -> None:
        unpack(wheel, contents, folder)
        os._exit(9)  # as SIGKILL would: nothing is cleaned up

    toolchain.unpack = die
    obtain((DEVICE,))


def test_a_build_that_was_killed_leaves_a_usable_cache(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha = make_wheel(tmp_path / "wheels", "alpha")
    store = use(pin(alpha))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(alpha.parent))
    process = FORK.Process(target=die_while_unpacking)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(leftovers(store)) == 1, "the killed build should have left its half"
    assert not is_whole(store / pin(alpha).folder)
    assert is_whole(obtain((DEVICE,)).folders["alpha"])
    assert leftovers(store) == []


@pytest.mark.parametrize("damage", ["shorter", "missing", "no list"])
def test_a_damaged_cache_is_mended(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    alpha = make_wheel(tmp_path / "wheels", "alpha")
    use(pin(alpha))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(alpha.parent))
    folder = obtain((DEVICE,)).folders["alpha"]
    if damage == "shorter":
        os.truncate(folder / "alpha/bin/tool", 100)
    elif damage == "missing":
        (folder / "alpha/lib/part").unlink()
    else:
        (folder / "unpacked.json").write_text('{"alpha/')
    assert not is_whole(folder)
    assert (obtain((DEVICE,)).folders["alpha"] / "alpha/bin/tool").read_bytes() == PAYLOAD


def obtain_slowly(start: "multiprocessing.synchronize.Barrier", log: "multiprocessing.SimpleQueue[str]") -> None:
    unpack = toolchain.unpack

    def slow(wheel: Path, contents: Contents, folder: Path) -> None:
        log.put("unpacking")
        unpack(wheel, contents, folder)
        import time

        time.sleep(0.5)

    toolchain.unpack = slow
    start.wait()
    whole = is_whole(obtain((DEVICE,), log.put).folders["alpha"])
    os._exit(0 if whole else 1)


def test_two_builds_at_once_share_one_cache(
    use: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha = make_wheel(tmp_path / "wheels", "alpha")
    use(pin(alpha))
    monkeypatch.setenv(settings.TOOLCHAIN_DIR, str(alpha.parent))
    start, log = FORK.Barrier(3), FORK.SimpleQueue()
    processes = [FORK.Process(target=obtain_slowly, args=(start, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = []
    while not log.empty():
        lines.append(log.get())
    assert lines.count("unpacking") == 1, "the others must wait and use what the first one unpacked"
    assert sum(line.startswith("waiting for another build") for line in lines) == 2


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(settings.CACHE_DIR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_root() == tmp_path / "flash_kda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert settings.cache_root() == Path("/home/somebody/.cache/flash_kda")
    monkeypatch.setenv(settings.CACHE_DIR, "~/mine")
    assert settings.cache_root() == Path("/home/somebody/mine")


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        (settings.JOBS, "0", settings.jobs),
        (settings.JOBS, "many", settings.jobs),
        (settings.ALLOW_UNLOCKED, "maybe", lambda: settings.flag(settings.ALLOW_UNLOCKED)),
        (settings.GLIBC, "2.31", settings.glibc),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BuildError, match=re.escape(f"{variable}={value}: expected")):
        read()
