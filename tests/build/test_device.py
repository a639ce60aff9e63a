"""Device code: PTX clean-up, ptxas' figures, spills, determinism, the store of cubins, and the compilers' failures."""

import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Callable

import pytest

from tools import device, ptx, ptxas, settings
from tools.errors import BuildError
from tools.toolchain import Toolchain
from tools.units import UNITS, Unit

KERNEL = """
#include <cute/tensor.hpp>
#include "part.h"
extern "C" __global__ void scale(float* x, float by) {
    auto layout = cute::make_layout(cute::make_shape(cute::Int<4>{}, cute::Int<8>{}));
    x[layout(threadIdx.x % 4, threadIdx.x / 4)] *= by * kPart * table[threadIdx.x % 3];
}
"""
PART = "#pragma once\nconstexpr float kPart = 2.0f;\n__constant__ float table[3] = {1, 2, 3};\n"
# 64 values live across a loop, in 24 registers.
SPILLING = """
extern "C" __global__ void __maxnreg__(24) spill(float* x) {
    float v[64];
    for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
    for (int n = 0; n < 10; ++n)
        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 1) % 64] + n;
    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
"""


def job(folder: Path, source: str = KERNEL, **changes: object) -> device.Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.cu").write_text(source, encoding="utf-8")
    (folder / "part.h").write_text(PART, encoding="utf-8")
    return replace(device.Job(Unit("scale", "scale.cu", ("90a",)), "90a", folder), **changes)  # type: ignore[arg-type]


def sections(elf: bytes, prefix: bytes) -> dict[bytes, bytes]:
    """Contents of the ELF sections whose name starts with `prefix`."""

    def number(offset: int, size: int) -> int:
        return int.from_bytes(elf[offset : offset + size], "little")

    table, size, count, names = number(40, 8), number(58, 2), number(60, 2), number(62, 2)
    headers = [table + size * index for index in range(count)]
    strings = number(headers[names] + 24, 8)
    found = {}
    for header in headers:
        start = strings + number(header, 4)
        name = elf[start : elf.index(b"\0", start)]
        if name.startswith(prefix):
            found[name] = elf[number(header + 24, 8) : number(header + 24, 8) + number(header + 32, 8)]
    return found


def test_unused_globals_go_and_everything_else_stays() -> None:
    text = """\
.version 8.8
.target sm_90a
.global .align 1 .b8 unused[1] = {5};
.global .align 4 .u32 used = 7;
.visible .global .align 8 .b8 looked_up_by_the_host[16];
.const .align 4 .f32 constant = 0f3F800000;
.global .align 8 .u64 only_user_of_next = generic(next);
.global .align 1 .b8 next[3] = {0, 1, 2};
.extern .shared .align 16 .b8 smem[];
.visible .entry f(.param .u64 p)
{
\tld.global.u32 %r1, [used];
}
"""
    stripped = ptx.strip_unused_globals(text, frozenset({"looked_up_by_the_host"}))
    kept = [
        line for line in text.splitlines() if not any(w in line for w in ("unused", "constant", "only_user", "next"))
    ]
    assert stripped.splitlines() == kept


def test_stripping_does_not_change_the_instructions(real_toolchain: Toolchain, tmp_path: Path) -> None:
    device.run_nvrtc(job(tmp_path / "source"), real_toolchain, tmp_path / "raw.ptx")
    raw = (tmp_path / "raw.ptx").read_text(encoding="utf-8")
    clean = ptx.strip_unused_globals(raw)
    assert raw.count("\n.global") > 100, "NVRTC no longer leaves the globals that the stripping is for"
    assert clean.count("\n.global") < 5
    assert "table" in clean
    (tmp_path / "clean.ptx").write_text(clean, encoding="utf-8")
    text = []
    for name in ("raw", "clean"):
        ptxas.assemble(real_toolchain.ptxas, tmp_path / f"{name}.ptx", tmp_path / f"{name}.cubin", "90a", ())
        text.append(sections((tmp_path / f"{name}.cubin").read_bytes(), b".text."))
    assert list(text[0]) == [b".text.scale"]
    assert text[0] == text[1]
    assert (tmp_path / "clean.cubin").stat().st_size < (tmp_path / "raw.cubin").stat().st_size / 5


LOG = """\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 17 barriers, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 12.000 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    32 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'second'
ptxas warning : Value of threads per SM for entry second is out of range
"""


def test_figures_and_warnings_of_ptxas() -> None:
    assert ptxas.parse_resources(LOG) == {
        "first": {"registers": 168, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 49152},
        "second": {"registers": 32, "stack": 32, "spill_stores": 12, "spill_loads": 20, "shared": 0},
        "helper": {"registers": 0, "stack": 8, "spill_stores": 4, "spill_loads": 4, "shared": 0},
    }
    assert [line.split(":")[0] for line in ptxas.parse_warnings(LOG)] == ["ptxas info    ", "ptxas warning "]
    assert "C7510" in ptxas.parse_warnings(LOG)[0]
    resources = ptxas.parse_resources(LOG)
    assert [text.split()[0] for text in ptxas.spilling(resources, frozenset())] == ["helper", "second"]
    assert ptxas.spilling(resources, frozenset({"helper", "second"})) == []


def test_the_same_source_in_two_folders_gives_the_same_bytes(real_toolchain: Toolchain, tmp_path: Path) -> None:
    made = []
    for name in ("one", "a much longer name, with a space"):
        folder = tmp_path / name
        made += device.build([job(folder / "source")], real_toolchain, folder / "store")
    assert made[0].sha256 == made[1].sha256
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert str(tmp_path).encode() not in made[0].path.read_bytes()
    assert made[0].resources["scale"]["registers"] > 0


def test_a_cubin_is_kept_until_something_that_decides_it_changes(real_toolchain: Toolchain, tmp_path: Path) -> None:
    store, first = tmp_path / "store", job(tmp_path / "source")

    def built(what: device.Job) -> str:
        lines: list[str] = []
        device.build([what], real_toolchain, store, lines.append)
        return "kept" if lines[-1].endswith("kept from before") else "made"

    assert built(first) == "made"
    assert device.is_kept(first, real_toolchain.digest, store)
    assert built(first) == "kept"
    assert built(replace(first, arch="100a")) == "made"
    assert built(replace(first, options=("-DSOMETHING=1",))) == "made"
    (tmp_path / "source" / "part.h").write_text(PART.replace("2.0f", "3.0f"), encoding="utf-8")
    assert built(first) == "made"
    assert not device.is_kept(first, "another toolchain", store)


def test_a_damaged_cubin_in_the_store_is_made_again(real_toolchain: Toolchain, tmp_path: Path) -> None:
    first = job(tmp_path / "source")
    made = device.build([first], real_toolchain, tmp_path / "store")[0]
    right = made.path.read_bytes()
    made.path.write_bytes(right[:-1])
    assert device.build([first], real_toolchain, tmp_path / "store")[0].path.read_bytes() == right


def test_spills_fail_unless_the_unit_allows_them(real_toolchain: Toolchain, tmp_path: Path) -> None:
    spilling = job(tmp_path / "source", SPILLING)
    with pytest.raises(
        BuildError, match=r"registers spill in scale for sm_90a: spill \(\d+ bytes stored, \d+ loaded\)"
    ):
        device.build([spilling], real_toolchain, tmp_path / "store")
    allowed = replace(spilling, unit=replace(spilling.unit, spills_allowed=frozenset({"spill"})))
    made = device.build([allowed], real_toolchain, tmp_path / "store")[0]
    assert made.resources["spill"]["spill_stores"] > 0
    assert device.build([spilling], real_toolchain, tmp_path / "store", allow_spills=True)[0].sha256 == made.sha256


def test_an_error_in_the_source_is_one_line_with_the_place(
    real_toolchain: Toolchain, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        BuildError, match=r"scale\.cu does not compile for sm_90a: scale\.cu\(6\): error: .*undefined_name"
    ):
        device.build(
            [job(tmp_path / "source", KERNEL.replace("by *", "undefined_name *"))],
            real_toolchain,
            tmp_path / "s",
        )
    assert "undefined_name" in capfd.readouterr().err, "the compiler's full text must be shown too"


def test_a_missing_source(real_toolchain: Toolchain, tmp_path: Path) -> None:
    lost = job(tmp_path / "source")
    (tmp_path / "source" / "scale.cu").unlink()
    with pytest.raises(BuildError, match="cannot read the kernel source of scale: No such file"):
        device.build([lost], real_toolchain, tmp_path / "store")


def test_a_damaged_toolchain_is_one_line(real_toolchain: Toolchain, tmp_path: Path) -> None:
    folder = tmp_path / "nvcc"
    tool = folder / "nvidia/cuda_nvcc/bin/ptxas"
    tool.parent.mkdir(parents=True)
    shutil.copytree(
        real_toolchain.folders["nvidia-cuda-nvcc-cu12"] / "nvidia/cuda_nvcc/include",
        folder / "nvidia/cuda_nvcc/include",
    )
    broken = replace(real_toolchain, folders={**real_toolchain.folders, "nvidia-cuda-nvcc-cu12": folder})
    with pytest.raises(BuildError, match="cannot run ptxas: No such file"):
        device.build([job(tmp_path / "source")], broken, tmp_path / "store")
    tool.write_text("#!/bin/sh\necho 'ptxas fatal   : out of luck' >&2\nexit 255\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(BuildError, match="ptxas failed for sm_90a with status 255: ptxas fatal : out of luck"):
        device.build([job(tmp_path / "source")], broken, tmp_path / "store")
    assert [path for path in (tmp_path / "store").iterdir() if not path.name.startswith(".part-")] == []


def test_a_killed_compiler_is_explained(
    real_toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(device.sys, "executable", str(killed))
    with pytest.raises(BuildError, match=r"killed \(signal 9\) at scale\.90a: out of memory\? set FLASH_KDA_JOBS=1"):
        device.build([job(tmp_path / "source")], real_toolchain, tmp_path / "store")


def test_a_ptx_that_cannot_be_written(real_toolchain: Toolchain, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^cannot write device code into /dev: No space left on device"):
        device.run_nvrtc(job(tmp_path / "source"), real_toolchain, Path("/dev/full"))


def test_an_unwritable_build_folder(real_toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match="cannot write device code into"):
        device.build([job(tmp_path / "source")], real_toolchain, tmp_path / "file" / "store")


@pytest.mark.parametrize(
    ("cores", "gigabytes", "wanted", "count"),
    [(8, 64, 5, 5), (8, 64, 20, 8), (32, 9, 20, 4), (8, 1, 5, 1), (1, 64, 5, 1)],
)
def test_compilers_at_once_fit_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, gigabytes: int, wanted: int, count: int
) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(device, "free_memory", lambda: gigabytes << 30)
    assert device.job_count(wanted) == count
    monkeypatch.setenv(settings.JOBS, "3")
    assert device.job_count(wanted) == min(3, wanted)


def test_free_memory_knows_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable:    4194304 kB\n")
    assert device.free_memory(tmp_path, tmp_path / "none") == 4 << 30
    version_2 = tmp_path / "v2"
    version_2.mkdir()
    (version_2 / "memory.current").write_text(f"{1 << 30}\n")
    (version_2 / "memory.max").write_text("max\n")
    assert device.free_memory(tmp_path, version_2) == 4 << 30
    (version_2 / "memory.max").write_text(f"{3 << 30}\n")
    assert device.free_memory(tmp_path, version_2) == 2 << 30
    version_1 = tmp_path / "v1" / "memory"
    version_1.mkdir(parents=True)
    (version_1 / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    (version_1 / "memory.usage_in_bytes").write_text(f"{1 << 30}\n")
    assert device.free_memory(tmp_path, tmp_path / "v1") == 1 << 30


def test_cubins_command(command: Callable[..., object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = command("cubins", "--arch", "100a", "--unit", "portable", "--out", str(out), "--keep-ptx")
    assert result.returncode == 0, result.stderr  # type: ignore[attr-defined]
    assert sorted(path.name for path in out.iterdir()) == ["portable.100a.cubin", "portable.100a.ptx"]
    assert (out / "portable.100a.cubin").read_bytes().startswith(b"\x7fELF")
    assert b".target sm_100a" in (out / "portable.100a.ptx").read_bytes()


def test_device_code_reaches_no_host_header() -> None:
    """The border of the house: csrc/kernels includes nothing of csrc/host."""
    for unit in UNITS:
        reached = {
            path.relative_to(device.SOURCES).parts[0] for path in device.sources(device.Job(unit, unit.archs[0]))
        }
        assert reached == {"kernels"}
