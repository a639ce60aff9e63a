"""The package without torch, and the public names."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_kda

PARENT = Path(flash_kda.__file__).resolve().parent.parent


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder that hides torch when it comes first on the path."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return tmp_path


def python(*arguments: str, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, *arguments]
    variables = {"PYTHONPATH": ":".join(str(p) for p in (*path, PARENT)), "PATH": "/usr/bin:/bin"}
    return subprocess.run(program, capture_output=True, text=True, check=False, env=variables, cwd=path[0])


def test_import_needs_no_torch(no_torch: Path) -> None:
    program = """
import sys
import flash_kda
from flash_kda import device_code
assert callable(flash_kda.is_available) and flash_kda.device_code is device_code
assert isinstance(flash_kda.__version__, str)
assert "torch" not in sys.modules and "flash_kda.forward" not in sys.modules
for name in ("fwd", "reference", "get_workspace_size"):
    try:
        getattr(flash_kda, name)
    except ImportError as error:
        assert f"flash_kda.{name} needs torch >= 2.4" in str(error), error
    else:
        raise AssertionError(name)
"""
    done = python("-c", program, path=(no_torch,))
    assert done.returncode == 0, done.stderr


def test_import_loads_nothing(tmp_path: Path) -> None:
    done = python("-c", "import flash_kda, sys; assert 'torch' not in sys.modules", path=(tmp_path,))
    assert done.returncode == 0, done.stderr


def test_doctor_reports_the_leavings_of_a_torch(tmp_path: Path) -> None:
    """An uninstalled torch may leave a folder that can be imported and holds nothing."""
    (tmp_path / "torch.py").write_text("")
    done = python("-m", "flash_kda", "doctor", path=(tmp_path,))
    assert done.returncode in (1, 4), done.stderr
    assert "not found: AttributeError" in done.stdout
    assert done.stderr == ""


def test_doctor_keeps_its_exit_code_if_nobody_reads_it(no_torch: Path) -> None:
    expected = python("-m", "flash_kda", "doctor", path=(no_torch,)).returncode
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flash_kda", "doctor"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
            env={"PYTHONPATH": f"{no_torch}:{PARENT}", "PATH": "/usr/bin:/bin"}, cwd=no_torch,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == expected
    assert done.stderr == ""


def test_the_command_line_spells_what_the_terminal_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda import __main__ as command_line

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    command_line._say("/home/\u00fcser/flash_kda")
    assert written.getvalue() == b"/home/\\xfcser/flash_kda\n"


def test_doctor_runs_without_torch(no_torch: Path) -> None:
    done = python("-m", "flash_kda", "doctor", path=(no_torch,))
    assert done.returncode in (1, 4), done.stderr  # 1 in a source tree that was not built
    assert "skipped: torch is not installed" in done.stdout
    assert done.stderr == ""


def test_public_names() -> None:
    pytest.importorskip("torch")
    assert flash_kda.__all__ == sorted(flash_kda.__all__, key=str.lower)
    for name in flash_kda.__all__:
        assert name in dir(flash_kda)
        assert getattr(flash_kda, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'fwd_cp'"):
        flash_kda.fwd_cp  # noqa: B018


def test_signature() -> None:
    pytest.importorskip("torch")
    import inspect

    parameters = inspect.signature(flash_kda.fwd).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound",
        "initial_state", "final_state", "cu_seqlens",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
        "state_indices", "intermediate_states", "checkpoint_states", "checkpoint_offsets", "workspace", "cu_seqlens_cpu",
        "batch_invariant", "enable_cp",
    ]  # fmt: skip
    assert [p.default for p in parameters.values()][10:13] == [None] * 3
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in list(parameters.values())[13:])
    assert list(inspect.signature(flash_kda.get_workspace_size).parameters) == ["T_total", "H", "N"]


def test_types_are_shipped() -> None:
    assert (Path(flash_kda.__file__).parent / "py.typed").exists()
