"""The host module: which Python it is for, which compiler makes it, and what it says when it cannot."""

import json
import os
import sys
from pathlib import Path

import pytest

from tools import embed, host, settings
from tools.archs import plan
from tools.device import Cubin
from tools.errors import BuildError
from tools.toolchain import Toolchain

FIGURES = {"f": {"registers": 1, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}}


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_this_python_is_described() -> None:
    python = host.describe_python()
    assert python.module_name.startswith(f"_native.cpython-{sys.version_info[0]}{sys.version_info[1]}-")
    assert (Path(python.include) / "Python.h").is_file()


def test_pythons_that_cannot_be_built_for(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot run /no/python: No such file"):
        host.describe_python("/no/python")
    with pytest.raises(BuildError, match="does not work as a Python: oh no"):
        host.describe_python(script(tmp_path / "broken", "echo 'oh no' >&2; exit 3"))
    answer = json.dumps(["3.12.0", str(tmp_path), "", ".so", "x86_64", "Linux"])
    with pytest.raises(BuildError, match=r"has no .*/Python\.h; install its headers \(python3-dev\)"):
        host.describe_python(script(tmp_path / "headless", f"echo '{answer}'"))
    answer = json.dumps(["3.12.0", str(tmp_path), "", ".so", "arm64", "Darwin"])
    with pytest.raises(BuildError, match="not on Darwin arm64"):
        host.describe_python(script(tmp_path / "mac", f"echo '{answer}'"))


def test_the_pinned_compiler_sees_nothing_of_the_environment(
    real_toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPATH", "/somewhere")
    monkeypatch.setenv("LIBRARY_PATH", "/somewhere")
    cxx = host.compiler(host.describe_python(), real_toolchain)
    assert cxx.name == f"zig {real_toolchain.versions['ziglang']} {os.uname().machine}-linux-gnu.2.17"
    assert "CPATH" not in cxx.environment
    assert "LIBRARY_PATH" not in cxx.environment
    monkeypatch.setenv(settings.GLIBC, "2.28")
    assert host.compiler(host.describe_python(), real_toolchain).name.endswith("-linux-gnu.2.28")


def test_another_compiler_can_be_named_and_must_exist(
    real_toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(settings.CXX, script(tmp_path / "my-c++", "exit 0") + " -v")
    cxx = host.compiler(host.describe_python(), real_toolchain)
    assert (cxx.name, cxx.command[1:]) == ("my-c++", ("-v",))
    monkeypatch.setenv(settings.CXX, "no-such-compiler")
    with pytest.raises(
        BuildError, match="FLASH_KDA_CXX=no-such-compiler: no such compiler; unset it to use the pinned one"
    ):
        host.compiler(host.describe_python(), real_toolchain)


def test_a_failing_compiler_ends_in_one_line_and_writes_no_module(
    real_toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    python, module = host.describe_python(), tmp_path / "_native.so"
    for text, says in (
        ("echo 'x.cpp:1: error: no luck' >&2; exit 1", "x.cpp:1: error: no luck"),
        ("echo 'LLVM ERROR: No space left on device' >&2; exit 1", "No space left on device"),
        ("kill -9 $$", "it said nothing"),
    ):
        monkeypatch.setenv(settings.CXX, script(tmp_path / "c++", text))
        with pytest.raises(BuildError, match=rf"the host compiler failed at \w+\.cpp: .*{says}"):
            host.build_module(
                python, host.compiler(python, real_toolchain), real_toolchain, folder / "embedded_cubins.cpp", module
            )
        assert not module.exists()


def cubin(folder: Path, unit: str, arch: str) -> Cubin:
    path = folder / f"{unit}-{arch}"
    path.write_bytes(b"\x7fELF" + arch.encode())
    return Cubin(unit, arch, path, "ab" * 32, path.stat().st_size, FIGURES)


def test_specific_cubins_come_before_those_of_a_family(tmp_path: Path) -> None:
    """The loader takes the first that fits, so 120a must stand before 120f."""
    cubins = [cubin(tmp_path, "u", arch) for arch in ("120f", "90a", "120a")]
    source = embed.write_embedded(cubins, {}, tmp_path).read_text(encoding="utf-8")
    rows = [line.split(",")[1].strip(' "') for line in source.splitlines() if line.startswith('    {"u"')]
    assert rows == ["90a", "120a", "120f"]
    assert '{"u", "120f", 12, 0, 9,' in source
    assert str(tmp_path) not in source


def test_the_record_has_no_time_and_no_place(
    real_toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins = [cubin(tmp_path, "u", "90a")]
    record = embed.build_record(plan("90a"), cubins, real_toolchain, "some compiler")
    assert record["locked"] is False, "a cubin that is not in device-code.lock"
    assert record["toolchain_lock"] == real_toolchain.digest
    assert record["cubins"] == [cubins[0].record()]
    assert str(tmp_path) not in json.dumps(record)
    assert "commit" not in record
    monkeypatch.setenv(settings.COMMIT, "0123abcd")
    record = embed.build_record(plan("90a"), cubins, real_toolchain, "c")
    assert (record["commit"], record["dirty"]) == ("0123abcd", False)
    monkeypatch.setenv(settings.COMMIT, "0123abcd-dirty")
    assert embed.build_record(plan("90a"), cubins, real_toolchain, "c")["dirty"] is True
    monkeypatch.setenv(settings.COMMIT, "main")
    with pytest.raises(BuildError, match="FLASH_KDA_COMMIT=main: expected a commit id in hex"):
        embed.build_record(plan("90a"), cubins, real_toolchain, "c")


def test_the_version_is_in_one_place() -> None:
    version = embed.project_version()
    mentions = [
        path.name
        for path in (
            *sorted((host.ROOT / "flash_kda").glob("*.py")),
            *sorted((host.ROOT / "tools").glob("*.py")),
            host.ROOT / "setup.py",
        )
        if f'"{version}"' in path.read_text(encoding="utf-8")
    ]
    assert mentions == []


def test_debian_keeps_pyconfig_in_a_folder_beside(tmp_path: Path) -> None:
    """Its pyconfig.h includes <MULTIARCH/pythonX.Y/pyconfig.h>; the compiler must see that, and no other header of the system."""
    include = tmp_path / "usr" / "include"
    headers, own = include / "python3.11", include / "x86_64-linux-gnu" / "python3.11"
    for folder in (headers, own, include / "x86_64-linux-gnu" / "bits"):
        folder.mkdir(parents=True)
    (own / "pyconfig.h").write_text("#define FROM_MULTIARCH 1\n")
    python = host.Python("python3", "3.11.2", str(headers), "x86_64-linux-gnu", ".so", "x86_64")
    scratch = tmp_path / "scratch"
    flag, shown = host.python_headers(python, scratch)
    assert flag == "-isystem"
    assert [p.name for p in (Path(shown) / "x86_64-linux-gnu").iterdir()] == ["python3.11"]
    assert (Path(shown) / "x86_64-linux-gnu" / "python3.11" / "pyconfig.h").read_text() == "#define FROM_MULTIARCH 1\n"
    elsewhere = host.Python("python3", "3.11.7", str(headers), "", ".so", "x86_64")
    _, shown = host.python_headers(elsewhere, tmp_path / "other")
    assert [path.name for path in Path(shown).iterdir()] == ["crypt.h"], "Python.h of 3.9 may include it"
