"""The operator that vLLM calls, in the place where vLLM looks for it, on the CPU path."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import engine_calls  # noqa: E402
import kda_cases as cases  # noqa: E402

import flash_kda  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")


def operators() -> dict[str, Any]:
    flash_kda.vllm.register()
    flash_kda.vllm.register()  # once more: nothing happens
    return {"flash_kda": torch.ops.flash_kda.fwd, "_flashkda_C": torch.ops._flashkda_C.fwd}


@pytest.mark.parametrize("name", ["flash_kda", "_flashkda_C"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_sixteen_arguments(name: str, checkpoints: int) -> None:
    engine_calls.check_vllm("cpu", operators()[name], checkpoints)


@pytest.mark.parametrize("name", ["flash_kda", "_flashkda_C"])
def test_without_checkpoints(name: str) -> None:
    engine_calls.check_vllm_without_checkpoints("cpu", operators()[name])


def test_a_seventeenth_argument() -> None:
    operator = operators()["_flashkda_C"]
    engine_calls.check_vllm("cpu", operator, 1, more=(None,))
    with pytest.raises(ValueError, match=r"^checkpoint_indptr: expected None, got a tensor"):
        engine_calls.check_vllm("cpu", operator, 1, more=(torch.zeros(5, dtype=torch.int32),))


def test_a_gradient_is_refused() -> None:
    operator = operators()["_flashkda_C"]
    p = cases.make("cpu", None, 2, batch=(1, 9))
    v = p.v.requires_grad_()
    with pytest.raises(RuntimeError, match=r"v requires a gradient, and flash_kda.fwd computes none"):
        operator(p.q, p.k, v, p.g, p.beta, 0.1, torch.empty_like(v), None, p.A_log, p.dt_bias, -5.0)


def test_the_schema() -> None:
    operators()
    arguments = torch.ops._flashkda_C.fwd.default._schema.arguments
    assert [a.name for a in arguments] == [
        "q", "k", "v", "g", "beta", "scale", "out", "workspace", "A_log", "dt_bias", "lower_bound", "initial_state",
        "final_state", "cu_seqlens", "checkpoint_states", "checkpoint_offsets", "checkpoint_indptr",
    ]  # fmt: skip
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"out", "workspace", "final_state", "checkpoint_states"}
    assert not any(a.kwarg_only for a in arguments)
    sizes = {torch.ops._flashkda_C.get_workspace_size(*counts) for counts in ((100, 12), (100, 12, 3))}
    assert sizes == {flash_kda.get_workspace_size(100, 12)}


def test_opcheck() -> None:
    operators()
    p = cases.make("cpu", [9, 11], 2, initial=cases.FP32, offsets=torch.int32)
    assert p.initial_state is not None
    results = torch.library.opcheck(
        torch.ops._flashkda_C.fwd.default,
        (p.q, p.k, p.v, p.g, p.beta, 0.1, torch.zeros_like(p.v), None, p.A_log, p.dt_bias, -5.0, p.initial_state,
         torch.zeros_like(p.initial_state), p.cu_seqlens),
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    parent = str(Path(flash_kda.__file__).resolve().parents[1])
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": parent, **variables}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, env=variables
    )


def test_vllm_finds_the_operator_where_it_imports_its_own(tmp_path: Path) -> None:
    """vLLM imports ``vllm._flashkda_C`` for its side effect; its own build of it must not be loaded on top."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "_flashkda_C.py").write_text("raise AssertionError('vLLM loaded its own operator')\n")
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from flash_kda.vllm import plugin
        plugin()
        import vllm._flashkda_C  # noqa: F401
        import torch
        print(torch.ops._flashkda_C.fwd.default._schema)
    """
    done = python(program, FLASH_KDA_VLLM="1")
    assert done.returncode == 0, done.stderr
    assert "checkpoint_offsets" in done.stdout
    not_asked_for = python(program)
    assert "vLLM loaded its own operator" in not_asked_for.stderr


def test_too_late() -> None:
    program = """
        import torch
        library = torch.library.Library("_flashkda_C", "DEF")
        library.define("fwd(Tensor q) -> ()")
        import flash_kda
        flash_kda.vllm.register()
    """
    done = python(program)
    assert "RuntimeError: flash_kda.vllm.register: expected to come before vLLM loads its own" in done.stderr


def test_the_plugin_is_declared() -> None:
    try:
        (declared,) = entry_points(group="vllm.general_plugins", name="flash_kda")
    except ValueError:
        pytest.skip("flash_kda is not installed: entry points are in the metadata of the wheel")
    assert declared.load() is flash_kda.vllm.plugin
