"""The kernels that this device could run but does not prefer: each gets the tests of results, states and times, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import record  # noqa: E402

from flash_kda import device_code  # noqa: E402
from flash_kda.self_benchmark import KERNELS  # noqa: E402

HERE = Path(__file__).resolve().parent
PACKAGE = Path(device_code.__file__).resolve().parent.parent
# Large cases that differ from the small ones in size alone are left to the preferred kernel, and so is how much forgetting gains.
LEFT_OUT = "official_shapes or long_memory or more_than or forgetting_takes or in_vain"
# The same flash_kda as here, whatever lies in the current folder.
START = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_code.choose(0).kernel == kernel:
        pytest.skip("this is the kernel that the rest of the run tests")
    monkeypatch.setenv("FLASH_KDA_KERNEL", kernel)
    asked = device_code.choose(0)
    if asked.kernel is None and "cannot run on" in asked.reason:
        pytest.skip(asked.reason)
    assert asked.kernel == kernel, asked.reason
    target = tmp_path / "record.json"
    done = subprocess.run(
        [
            sys.executable, "-c", START, "-q", "-x", "-p", "no:cacheprovider", "-k", f"not ({LEFT_OUT})",
            "--record", str(target), str(HERE / "test_accuracy.py"), str(HERE / "test_layout.py"), str(HERE / "test_split.py"),
            str(HERE / "test_times.py"), str(HERE / "test_forms.py"), str(HERE / "test_states.py"),
            str(HERE / "test_forget.py"),
        ],
        capture_output=True, text=True, check=False, timeout=300, cwd=HERE.parent.parent, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    other = json.loads(target.read_text())
    assert other["kernels"] == [kernel]
    assert other["tests"]["passed"] > 100
    record.merge(other, f"{kernel}:")
