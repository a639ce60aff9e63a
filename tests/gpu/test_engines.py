"""Engines and torch's compilers on a GPU: the bodies of tests/engines and what only a GPU has (Triton, CUDA graphs).

flash-linear-attention is taken from the folders in FLASH_KDA_TEST_FLA (separated by colons, one release each, with what FLA imports
beside it or installed), else from where it is installed; without it these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import engine_calls  # noqa: E402
import kda_cases as cases  # noqa: E402
import record  # noqa: E402
from kda_cases import BF16, FP32, WEAK  # noqa: E402

import flash_kda  # noqa: E402

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
FLA = [str(Path(folder).resolve()) for folder in os.environ.get("FLASH_KDA_TEST_FLA", "").split(os.pathsep) if folder]
LIMIT = 8e-3
FLA_SECONDS = 110  # for all programs that run FLA, together


# ---- serving engines


@pytest.mark.parametrize("beta_is_raw", [True, False], ids=["logits", "logits from activated beta"])
def test_sglang(beta_is_raw: bool) -> None:
    engine_calls.check_sglang("cuda", beta_is_raw)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sglang_with_a_pool(dtype: torch.dtype) -> None:
    engine_calls.check_sglang_pool("cuda", dtype)


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_vllm(checkpoints: int) -> None:
    flash_kda.vllm.register()
    for operator in (torch.ops.flash_kda.fwd, torch.ops._flashkda_C.fwd):
        engine_calls.check_vllm("cuda", operator, checkpoints)
        engine_calls.check_vllm_without_checkpoints("cuda", operator)


# ---- torch's compilers


@pytest.mark.parametrize(
    "options",
    [{"backend": "aot_eager"}, {"backend": "cudagraphs"}, {}, {"dynamic": True}, {"mode": "reduce-overhead"}],
    ids=str,
)
def test_compile(options: dict[str, Any]) -> None:
    if "backend" not in options and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("Triton, with which torch compiles for GPUs, needs a C compiler")
    engine_calls.check_compiled("cuda", **options)


def test_opcheck() -> None:
    p = cases.make("cuda", [100, 0, 37], 4, WEAK, initial=FP32)
    assert p.initial_state is not None
    results = torch.library.opcheck(
        torch.ops.flash_kda.fwd.default,
        (p.q, p.k, p.v, p.g, p.beta, 0.1, torch.zeros_like(p.v), None, p.A_log, p.dt_bias, -5.0, p.initial_state,
         torch.zeros_like(p.initial_state), p.cu_seqlens),
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}


def test_an_exported_program_takes_streams_and_graphs() -> None:
    p = cases.make("cuda", None, 4, WEAK, batch=(1, 137))

    class Program(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return flash_kda.fwd(q, p.k, p.v, p.g, p.beta, 0.1, None, p.A_log, p.dt_bias, -5.0)[0]

    with torch.no_grad():
        expected = Program()(p.q)
        module = torch.export.export(Program(), (p.q,)).module()
        cases.check_same(module(p.q), expected, "out")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(p.q)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        cases.check_same(out, expected, "out of a replayed graph")


# ---- what an installation says of itself


def test_availability_and_explanations() -> None:
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda", 0)):
        assert flash_kda.is_available(device), device
    assert not flash_kda.is_available(torch.cuda.device_count())
    long = cases.make("cuda", None, 2, WEAK, batch=(1, 16384))
    many = cases.make("cuda", None, 2, WEAK, batch=(200, 64))
    for p, segments in ((long, True), (many, False)):
        call = (p.q, p.k, p.v, p.g, p.beta, 0.1, None, p.A_log, p.dt_bias, -5.0)
        explanation = flash_kda.explain(*call)
        assert explanation.path == flash_kda.device_code.choose(0).kernel
        assert explanation.segments is (segments and os.environ.get("FLASH_KDA_SPLIT") != "0")
        assert not flash_kda.explain(*call, batch_invariant=True).segments


# ---- flash-linear-attention


class Programs:
    """Programs with FLA, which take their time for Triton's compiler on one core: all are started before the first is waited for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, time.monotonic()
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, release: str | None, *command: str) -> None:
        path = [entry for entry in (release, str(Path(flash_kda.__file__).resolve().parents[1])) if entry]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        variables.pop("FLA_FLASH_KDA", None)
        with self.file(name, "out").open("w") as out, self.file(name, "err").open("w") as err:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-W", "ignore", *command], stdout=out, stderr=err, text=True, env=variables, cwd=HERE
            )

    def file(self, name: str, what: str) -> Path:
        return self.folder / f"{name}.{what}"

    def result(self, name: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr; a program that runs longer than allowed fails, with what it had said."""
        status: int | None
        try:
            status = self.processes[name].wait(max(0.0, self.started + FLA_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        out, err = (self.file(name, what).read_text() for what in ("out", "err"))
        assert status is not None, f"{name} has not ended within {FLA_SECONDS} s; it said:\n{out}{err}"
        return status, out, err


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    if not FLA and importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is neither installed nor in FLASH_KDA_TEST_FLA")
    programs = Programs(tmp_path_factory.mktemp("programs"))
    for folder in FLA or [None]:
        programs.start(release_name(folder), folder, "fla_session.py", "--device", "cuda")
    block = str(EXAMPLES / "kimi_linear_block.py")
    programs.start(
        "layer", FLA[-1] if FLA else None, "autotuning.py", block, "--device", "cuda", "--fla", "--tokens", "1024"
    )
    yield programs
    for process in programs.processes.values():
        process.kill()
        process.wait()


def release_name(folder: str | None) -> str:
    return Path(folder).name if folder else "installed"


@pytest.mark.parametrize("folder", FLA or [None], ids=release_name)
def test_fla(folder: str | None, programs: Programs) -> None:
    """One session with a release: every case is right, and ran through the backend that it should run through."""
    status, out, err = programs.result(release_name(folder))
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    version = found["version"]
    if "not importable" in found:
        pytest.skip(f"FLA {version} cannot be imported here: {found['not importable'][:100]}")
    record.used_kernel(0)
    for name, case in found.items():
        if not isinstance(case, dict) or "log" not in case:
            continue
        last = case["log"][-1] if case["log"] else "rejected"
        through_us = last.endswith("-> flash_kda.fla")
        assert case["fwd_calls"] == int("rejected" not in last), name
        if through_us:
            record.error(f"FLA {version}: {name}", **dict(zip(("out", "state"), case["errors"])))
            assert max(case["errors"]) <= LIMIT, name
            assert max(case.get("intermediate_errors", [0.0])) <= LIMIT, name
        elif case["fwd_calls"] == 0 and version != "0.5.0" and "raised" not in case:
            # FLA's Triton kernels, of which 0.5.0 ignores use_beta_sigmoid_in_kernel.
            assert max(case["errors"]) <= 2e-2, name
    assert found["as built in"]["fwd_calls"] == 1
    assert found["opted out"]["fwd_calls"] == 0
    assert found["opted out"]["log"] == []
    assert "errors" in found["opted out"], found["opted out"].get("raised")
    assert found["counts"]["served"] == 16


# ---- examples


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(Path(flash_kda.__file__).resolve().parents[1])}
    program = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py"), "--device", "cuda", *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False, env=variables, cwd=HERE)


def test_chunked_prefill_equals_one_pass() -> None:
    done = example("kimi_linear_block")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split(" differ by ")[1].split(",")[0]) < 1e-2


def test_chunked_prefill_of_fla_s_own_layer(programs: Programs) -> None:
    status, out, err = programs.result("layer")
    if status != 0 and "ModuleNotFoundError" in err:
        pytest.skip(f"FLA's layer cannot be imported: {err.strip().splitlines()[-1]}")
    assert status == 0, err
    assert float(out.split(" differ by ")[1].split(",")[0]) < 1e-2
    assert "chunk_kda: {'served': 5}" in out


def test_a_serving_loop_equals_one_call_each() -> None:
    done = example("serving_loop")
    assert done.returncode == 0, done.stdout + done.stderr
