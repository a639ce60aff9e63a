"""The release wheel: what is in it, what it says of itself, where it runs; and that each check can fail."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Callable

import pytest

from flash_kda import elf
from tools import host, locks, venvs, wheels
from tools.errors import BuildError
from tools.process import capture
from tools.toolchain import Toolchain
from tools.units import ARCHS, UNITS
from tools.wheels import Wheel

Members = dict[str, bytes]


LOCAL = b"/" + b"root/.cache/x"  # in two parts, since the tree is searched for such paths


def module_name(wheel: Wheel) -> str:
    return wheel.modules[0]


def test_the_wheel_is_fit_for_strangers(wheel: Wheel) -> None:
    assert wheels.problems(wheel) == []


def test_content(wheel: Wheel) -> None:
    sources = {f"flash_kda/{path.name}" for path in (host.ROOT / "flash_kda").glob("*.py")} | {"flash_kda/py.typed"}
    packaged = {name for name in wheel.members if name.startswith("flash_kda/")}
    assert packaged == sources | {module_name(wheel)}


def test_size(wheel_path: Path) -> None:
    assert wheel_path.stat().st_size <= 5_000_000


def test_metadata(wheel: Wheel) -> None:
    metadata = wheel.metadata()
    assert metadata["Name"] == ["flash_kda"]
    assert metadata["Requires-Dist"] == ["torch>=2.4"]
    assert metadata["Requires-Python"] == [">=3.9"]
    assert metadata["License-Expression"] == ["MIT AND BSD-3-Clause AND Apache-2.0 WITH LLVM-exception"]
    text = (host.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{metadata["Version"][0]}"' in text


def test_licenses_are_ours_and_those_of_what_we_carry(wheel: Wheel) -> None:
    shipped = {
        name.split("/licenses/", 1)[1]: data for name, data in wheel.members.items() if ".dist-info/licenses/" in name
    }
    assert set(shipped) == {"LICENSE", *(f"licenses/{name}.txt" for name in ("CUTLASS", "LLVM", "pybind11", "zig"))}
    assert shipped["LICENSE"] == (host.ROOT / "LICENSE").read_bytes()
    assert b"BSD-3-Clause" in shipped["licenses/CUTLASS.txt"]


def test_tag(wheel: Wheel) -> None:
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = os.uname().machine
    expected = {f"{python}-{python}-manylinux_2_17_{machine}", f"{python}-{python}-manylinux2014_{machine}"}
    assert set(wheel.metadata("WHEEL")["Tag"]) == expected
    assert wheel.metadata("WHEEL")["Root-Is-Purelib"] == ["false"]


def test_auditwheel_agrees_with_the_tag(wheel_path: Path, full_toolchain: Toolchain) -> None:
    path = os.pathsep.join(map(str, full_toolchain.python_path))
    command = [sys.executable, "-S", "-m", "auditwheel", "show", str(wheel_path)]
    shown = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout
    shown = " ".join(shown.split())
    found = re.search(r'is consistent with the following platform tag: "manylinux_2_(\d+)_', shown)
    assert found, shown
    assert int(found[1]) <= 17
    newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_(\d+\.\d+)", shown))
    assert newest <= (2, 17)


def test_libraries(wheel: Wheel) -> None:
    library = elf.Library(wheel.members[module_name(wheel)])
    assert "libc.so.6" in library.needed, "the reader of dynamic entries found nothing"
    assert [name for name in library.needed if re.search("cuda|cudart|torch|c10|nvrtc|stdc|c\\+\\+|python", name)] == []
    assert library.run_path == []


def test_no_executable_stack(wheel: Wheel) -> None:
    assert not elf.Library(wheel.members[module_name(wheel)]).executable_stack


SAY = """
import json, sys
from flash_kda import _native
assert "torch" not in sys.modules
print(json.dumps([_native.embedded(), json.loads(_native.build_record()), _native.driver()]))
"""


def test_it_imports_without_torch_and_carries_the_locked_device_code(wheel_path: Path, tmp_path: Path) -> None:
    environment = venvs.Environment(tmp_path / "venv")
    environment.install("--no-deps", str(wheel_path))
    result = capture([str(environment.python), "-c", SAY], cwd=tmp_path, env=environment.clean())
    assert result.returncode == 0, result.stderr
    embedded, record, driver = json.loads(result.stdout)
    locked = locks.read_device_code_lock()
    assert {f"{c['unit']}/{c['arch']}": c["sha256"] for c in embedded} == {
        key: c["sha256"] for key, c in locked.items()
    }
    assert len(embedded) == sum(len(unit.archs) for unit in UNITS)
    assert record["locked"] is True
    assert record["setting"] == "all"
    assert record["archs"] == [arch.name for arch in ARCHS]
    assert record["toolchain_lock"] == locks.toolchain_digest()
    assert record["host_compiler"].startswith("zig ")
    assert {f"{c['unit']}/{c['arch']}": c for c in record["cubins"]} == locked
    assert "/" not in json.dumps(record), "a path in the build record"
    assert driver["loaded"] or driver["reason"]


def without(name_ending: str) -> Callable[[Members], Members]:
    return lambda members: {name: data for name, data in members.items() if not name.endswith(name_ending)}


def changed(name_ending: str, old: bytes, new: bytes) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        name = next(name for name in members if name.endswith(name_ending))
        assert old in members[name]
        return {**members, name: members[name].replace(old, new)}

    return change


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without("licenses/CUTLASS.txt"), "licenses: licenses/CUTLASS.txt is not in the wheel"),
        (without(".dist-info/licenses/LICENSE"), "licenses: LICENSE is not in the wheel"),
        (changed("METADATA", b"Requires-Dist: torch>=2.4\n", b""), "metadata: Requires-Dist has no torch>=2.4"),
        (changed("METADATA", b"Requires-Python: >=3.9", b"Requires-Python: >=3.8"), "metadata: Requires-Python"),
        (changed("/WHEEL", b"-manylinux", b"-linux"), "tag: the file's name says"),
        (changed("/WHEEL", b"Tag: cp", b"Tag: cp9"), "tag: the file's name says"),
        (lambda members: {**members, "flash_kda/_native.abi3.so": b""}, "expected one module"),
        (lambda members: {**members, "flash_kda/_native.abi3.so": b""}, "_native.abi3.so is not a shared library"),
        (lambda members: {**members, "tools/__init__.py": b""}, "content: tools/__init__.py does not belong"),
        (lambda members: {**members, "flash_kda/x.pyc": b""}, "content: flash_kda/x.pyc does not belong"),
        (lambda members: {**members, "flash_kda/new.py": b""}, "RECORD: flash_kda/new.py is not listed"),
        (changed("flash_kda/__init__.py", b"import", b"import "), "RECORD: flash_kda/__init__.py"),
        (changed(".so", b"libpthread.so.0", b"libcudart.so.12"), "needs ['libcudart.so.12']"),
        (changed(".so", b'"locked": true', b'"locked": null'), "not that of device-code.lock"),
        (
            lambda m: {n: d + LOCAL if n.endswith(".so") else d for n, d in m.items()},
            f"holds the path {LOCAL.decode()}",
        ),
    ],
)
def test_each_check_can_fail(wheel: Wheel, spoil: Callable[[Members], Members], says: str) -> None:
    found = wheels.problems(wheel._replace(members=spoil(wheel.members)))
    assert [text for text in found if says in text], found


def test_a_large_wheel_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    large = tmp_path / wheel.path.name
    with large.open("wb") as file:
        file.truncate(5_000_001)
    assert any(text.startswith("size: 5000001") for text in wheels.problems(wheel._replace(path=large)))


def test_normalising_hides_clock_umask_and_order(wheel_path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    digests = set()
    for number, mode in ((1, 0o600), (2, 0o775)):
        path = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members if number == 1 else reversed(members):
                info = zipfile.ZipInfo(name, (2000 + number, 1, 1, 0, 0, 0))
                info.external_attr = mode << 16
                archive.writestr(info, data)
        wheels.normalise(path)
        digests.add(path.read_bytes())
    assert digests == {wheel_path.read_bytes()}


def test_a_refused_wheel_leaves_the_one_before_it(full_toolchain: Toolchain, wheel_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "dist"
    output.mkdir()
    before = output / wheel_path.name
    before.write_bytes(b"the wheel of an earlier build")
    raw = tmp_path / re.sub(r"-manylinux.*\.whl$", f"-linux_{os.uname().machine}.whl", wheel_path.name)
    raw.write_bytes(b"not a wheel")
    with pytest.raises(BuildError, match="auditwheel refuses"):
        wheels.repair(raw, full_toolchain, output)
    assert [path.name for path in output.iterdir()] == [before.name]
    assert before.read_bytes() == b"the wheel of an earlier build"


def test_an_unfit_wheel_takes_no_place(
    full_toolchain: Toolchain, wheel_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "SIZE_LIMIT", 1000)
    raw = host.ROOT / "build" / "wheel" / re.sub("-manylinux.*", f"-linux_{os.uname().machine}.whl", wheel_path.name)
    with pytest.raises(BuildError, match=r"is not fit to be released: size: \d+ bytes, allowed are 1000"):
        wheels.repair(raw, full_toolchain, tmp_path / "dist")
    assert list((tmp_path / "dist").iterdir()) == []
