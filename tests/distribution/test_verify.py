"""`python -m flash_kda verify`: true of our wheel, and each fault of other people's wheels is found, in small wheels that have it."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Callable

import pytest

from flash_kda import __main__ as command_line
from flash_kda import elf, verify
from tools import ROOT, locks
from tools.process import capture
from tools.toolchain import Toolchain

LOCK = ROOT / "device-code.lock"
Compile = Callable[..., bytes]


@pytest.fixture(scope="session")
def compile_library(full_toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """A real shared library out of C, for a machine and a glibc, with the pinned compiler."""
    folder = tmp_path_factory.mktemp("libraries")
    zig = str(full_toolchain.zig)
    environment = {**os.environ}
    for variable in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment[variable] = str(full_toolchain.scratch / "zig")

    def make(source: str, *options: str, target: str = "x86_64-linux-gnu.2.17", name: str = "x.so") -> bytes:
        (folder / "x.c").write_text(source)
        command = [zig, "cc", "-target", target, "-shared", "-s", "x.c", "-o", name, *options]
        result = capture(command, cwd=folder, env=environment)
        assert result.returncode == 0, result.stderr
        return (folder / name).read_bytes()

    return make


def write_wheel(
    folder: Path,
    members: "dict[str, bytes]",
    tag: str = "cp310-cp310-manylinux2014_x86_64",
    metadata: str = "",
    name: str = "other",
) -> Path:
    """A wheel that is well-formed and holds `members`."""
    info = f"{name}-1.0.dist-info"
    python, abi, platform = tag.split("-")
    tags = "".join(f"Tag: {python}-{abi}-{one}\n" for one in platform.split("."))
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tags}".encode(),
    }
    rows = []
    for member, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{member},sha256={digest},{len(data)}\n")
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path


MODULE = "other/_c.cpython-310-x86_64-linux-gnu.so"
PLAIN = "int f(void) { return 1; }"


def test_our_wheel_is_fit_and_its_machine_code_that_of_the_lock(wheel_path: Path) -> None:
    report = verify.verify(wheel_path, LOCK)
    assert report.faults == []
    assert report.open == []
    locked = locks.read_device_code_lock()
    assert {f"{code.unit}/{code.arch}": (code.sha256, code.size) for code in report.code} == {
        key: (cubin["sha256"], cubin["size"]) for key, cubin in locked.items()
    }
    assert {code.status for code in report.code} == {"as in the lock"}
    assert report.build
    assert report.build["toolchain_lock"] == locks.toolchain_digest()


def test_it_runs_without_torch_and_without_the_compiled_module(wheel_path: Path) -> None:
    """In the source tree, on a Python that has nothing installed."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flash_kda.__main__ import main; "
               f"code = main(['verify', {str(wheel_path)!r}]); assert not {{'torch', 'flash_kda._native'}} & set(sys.modules); sys.exit(code)"]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.count("as in the lock") == len(locks.read_device_code_lock())
    assert result.stdout.rstrip().endswith("FIT: the wheel keeps its promises")


def test_a_well_formed_foreign_wheel_has_no_fault(compile_library: Compile, tmp_path: Path) -> None:
    report = verify.verify(write_wheel(tmp_path, {MODULE: compile_library(PLAIN)}))
    assert report.faults == []
    assert report.open == ["machine code: this wheel has no build record of flash_kda"]


def test_a_newer_glibc_than_the_tag_promises(compile_library: Compile, tmp_path: Path) -> None:
    source = '#include <sys/stat.h>\nint f(struct stat* s) { return stat("x", s); }'  # stat@GLIBC_2.33
    library = compile_library(source, target="x86_64-linux-gnu.2.33")
    assert elf.Library(library).glibc == (2, 33)
    report = verify.verify(write_wheel(tmp_path, {MODULE: library}))
    assert report.faults == [f"tag: manylinux2014_x86_64 promises glibc 2.17, and {MODULE} needs GLIBC_2.33"]
    newer = write_wheel(tmp_path, {MODULE: library}, "cp310-cp310-manylinux_2_33_x86_64")
    assert verify.verify(newer).faults == []


def test_a_module_of_one_python_under_an_abi3_tag(compile_library: Compile, tmp_path: Path) -> None:
    library, tag = compile_library(PLAIN), "cp39-abi3-manylinux2014_x86_64"
    report = verify.verify(write_wheel(tmp_path, {MODULE: library}, tag))
    assert report.faults == [
        f"tag: {tag} is for every CPython from cp39 on, and {MODULE} for cp310 alone (no abi3 module)"
    ]
    assert verify.verify(write_wheel(tmp_path, {"other/_c.abi3.so": library}, tag)).faults == []


@pytest.fixture(scope="session")
def needs_cudart(compile_library: Compile) -> bytes:
    compile_library("int cudaFree(void* p) { return 0; }", "-Wl,-soname,libcudart.so.12", name="libcudart.so.12")
    return compile_library("int cudaFree(void*); int f(void) { return cudaFree(0); }", "libcudart.so.12")


@pytest.mark.parametrize(
    ("metadata", "fit"),
    [
        ("", False),
        ("Requires-Dist: torch>=2.4\n", False),  # torch brings one CUDA runtime or another, or none
        ("Requires-Dist: nvidia-cuda-runtime-cu11\n", False),
        ("Requires-Dist: nvidia-cuda-runtime-cu12; extra == 'cuda'\n", False),
        ("Requires-Dist: nvidia_cuda_runtime.cu12 (>=12.4)\n", True),
    ],
)
def test_a_cuda_library_that_metadata_does_not_mention(
    needs_cudart: bytes, tmp_path: Path, metadata: str, fit: bool
) -> None:
    report = verify.verify(write_wheel(tmp_path, {MODULE: needs_cudart}, metadata=metadata))
    fault = (
        f"libraries: {MODULE} needs libcudart.so.12, which is not in the wheel, and METADATA requires no "
        "nvidia-cuda-runtime-cu12 or nvidia-cuda-runtime"
    )
    assert report.faults == ([] if fit else [fault])


def test_a_cuda_library_inside_of_the_wheel_is_no_fault(
    needs_cudart: bytes, compile_library: Compile, tmp_path: Path
) -> None:
    members = {MODULE: needs_cudart, "other.libs/libcudart.so.12": compile_library(PLAIN)}
    assert verify.verify(write_wheel(tmp_path, members)).faults == []


def test_a_run_path_of_the_machine_that_built_it(compile_library: Compile, tmp_path: Path) -> None:
    members = {MODULE: compile_library(PLAIN, "-Wl,-rpath,/usr/local/cuda/lib64:$ORIGIN")}
    assert verify.verify(write_wheel(tmp_path, members)).faults == [
        f"libraries: {MODULE} searches /usr/local/cuda/lib64, a folder of the machine that built it"
    ]


def test_an_executable_stack(compile_library: Compile, tmp_path: Path) -> None:
    plain = compile_library(PLAIN)
    at = plain.index((0x6474E551).to_bytes(4, "little") + b"\6")  # PT_GNU_STACK, readable and writable
    members = {MODULE: plain[: at + 4] + b"\7" + plain[at + 5 :]}
    assert verify.verify(write_wheel(tmp_path, members)).faults == [f"libraries: {MODULE} asks for an executable stack"]


def test_machine_code_of_another_machine_python_or_of_none(compile_library: Compile, tmp_path: Path) -> None:
    library = compile_library(PLAIN)
    tag = "cp310-cp310-manylinux2014_aarch64"
    assert verify.verify(write_wheel(tmp_path, {MODULE: library}, tag)).faults == [
        f"tag: manylinux2014_aarch64 is for aarch64, and {MODULE} for x86_64"
    ]
    tag = "cp311-cp311-manylinux2014_x86_64"
    assert verify.verify(write_wheel(tmp_path, {MODULE: library}, tag)).faults == [
        f"tag: {MODULE} is of another Python than {tag}: cp310"
    ]
    tag = "py3-none-any"
    assert verify.verify(write_wheel(tmp_path, {"other/x.so": library}, tag)).faults == [
        f"tag: {tag} is for any machine, and other/x.so is machine code"
    ]
    cut = write_wheel(tmp_path, {MODULE: library[:100]})
    assert "is not a shared library that can be read" in verify.verify(cut).faults[0]


def test_a_wheel_that_calls_itself_ours_without_a_build_record(compile_library: Compile, tmp_path: Path) -> None:
    module = {"flash_kda/_native.cpython-310-x86_64-linux-gnu.so": compile_library(PLAIN)}
    assert verify.verify(write_wheel(tmp_path, module, name="flash_kda")).faults == [
        "device code: no build record in the wheel"
    ]


def test_every_byte_of_the_machine_code_counts(wheel: verify.Wheel) -> None:
    (module,) = wheel.modules
    data = wheel.members[module]
    for number, image in enumerate(elf.cubins(data)):
        at = data.index(image.data)
        for place in (at + 80, at + len(image.data) // 2, at + len(image.data) - 1):
            changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            report = verify.examine(wheel._replace(members={**wheel.members, module: changed}), LOCK)
            found = [fault for fault in report.faults if fault.startswith("device code:")]
            assert len(found) == 2, "one cubin that is not listed, one listed that is not there"
            assert report.code[number].status == "not in the build record"


def test_machine_code_against_another_lock(wheel_path: Path, tmp_path: Path) -> None:
    content = json.loads(LOCK.read_text())
    content["cubins"][0]["sha256"] = "0" * 64
    content["cubins"].append({**content["cubins"][0], "arch": "130a"})
    (tmp_path / "lock").write_text(json.dumps(content))
    report = verify.verify(wheel_path, tmp_path / "lock")
    assert [code.status for code in report.code].count("NOT AS IN THE LOCK") == 1
    assert any(f"and the lock says {'0' * 64}" in fault for fault in report.faults)
    assert any("has all architectures" in fault and "130a is missing" in fault for fault in report.faults)
    assert verify.verify(wheel_path).open == ["machine code against device-code.lock: name one with --lock"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"locked": true', b'"locked": null', "build record: the machine code is not that of device-code.lock"),
        (b'"archs": ["90a", ', b'"archs": [       ', "build record: it says 100a, 103a"),
        (b'"version": "0.1.0"', b'"version": "0.1.1"', "build record: it is of version 0.1.1, and the wheel of 0.1.0"),
    ],
)
def test_a_build_record_that_does_not_fit_its_wheel(wheel: verify.Wheel, old: bytes, new: bytes, says: str) -> None:
    (module,) = wheel.modules
    assert wheel.members[module].count(old) == 1
    changed = wheel.members[module].replace(old, new)
    report = verify.examine(wheel._replace(members={**wheel.members, module: changed}), LOCK)
    assert any(fault.startswith(says) for fault in report.faults), report.faults


def test_the_command(
    wheel_path: Path, compile_library: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["verify", str(wheel_path), "--lock", str(LOCK), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["faults"] == []
    assert report["code"][0]["status"] == "as in the lock"
    unfit = write_wheel(tmp_path, {MODULE: compile_library(PLAIN)}, "cp310-abi3-manylinux2014_x86_64")
    assert command_line.main(["verify", str(wheel_path), str(unfit)]) == 1
    text = capsys.readouterr().out
    assert "verdict     UNFIT: 1 fault\n" in text
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"no zip")
    for path, says in (
        ("a-1.0-py3-none-any.whl", "cannot be read"),
        ("b.whl", "is not named as a wheel"),
        ("c-1-py3-none-any.whl", "cannot be read"),
    ):
        assert command_line.main(["verify", str(tmp_path / path)]) == 1
        assert says in capsys.readouterr().err
    assert command_line.main(["verify", str(wheel_path), "--lock", str(tmp_path / "none")]) == 1
    assert "cannot be read as a device-code.lock" in capsys.readouterr().err
