"""``torch.ops.flash_kda``: what tracers record, that it computes what an eager call does, and that no derivative is lost silently."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_native  # noqa: E402
import kda_cases as cases  # noqa: E402
from kda_cases import BF16, FP32, WEAK  # noqa: E402
from torch._subclasses import FakeTensor, FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import ops  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own compiler
]
K = 128
OP = torch.ops.flash_kda.fwd.default


def program(q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, state: Any) -> Any:
    """A call between other operators, with one tensor as both states."""
    out, state = flash_kda.fwd(q * 1, k, v, g, beta, K**-0.5, None, A_log, dt_bias, -5.0, state, state)
    return out + 1, state


class Program(torch.nn.Module):
    def forward(self, *arguments: Any) -> Any:
        return program(*arguments)


def tensors(T: int = 40) -> list[Any]:
    p = cases.make("cpu", None, 2, WEAK, batch=(1, T), initial=FP32)
    return [p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state]


def check_same_as_eager(traced: Any, T: int = 40) -> None:
    arguments = tensors(T)
    expected_state = arguments[-1].clone()
    expected_out, _ = program(*arguments[:-1], expected_state)
    state = arguments[-1].clone()
    out, returned = traced(*arguments[:-1], state)
    cases.check_same(out, expected_out, "out")
    cases.check_same(state, expected_state, "state, written in place")
    cases.check_same(returned, expected_state, "state, returned")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- tracers


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compile(mode: Any) -> None:
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    with mode():
        check_same_as_eager(compiled)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles CPU programs with g++, which is not installed")
def test_compile_to_machine_code() -> None:
    compiled = torch.compile(program, fullgraph=True)
    with torch.no_grad():
        check_same_as_eager(compiled)


def test_compile_with_lengths_that_change() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=count)
    for T in (40, 17, 90):
        check_same_as_eager(compiled, T)
    assert len(graphs) == 1


def test_compile_takes_every_option() -> None:
    """What the graph holds is what the operator runs with: all options off their defaults, against an eager call."""
    p = cases.make("cpu", [40, 0, 100], 2, WEAK, initial=FP32, group=2, offsets=torch.int32)
    pool = torch.randn(5, 2, K, K)
    offsets = torch.tensor([16, 0, 64], dtype=torch.int32)
    indices = torch.tensor([3, -1, 0])

    def call(beta: Any, g: Any, pool: Any, intermediate: Any, checkpoint: Any, workspace: Any) -> Any:
        out, _ = flash_kda.fwd(
            p.q, p.k, p.v, g, beta, 0.3, None, None, None, None, pool, pool, p.cu_seqlens,
            use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True,
            state_v_first=False, state_indices=indices, intermediate_states=intermediate, checkpoint_states=checkpoint,
            checkpoint_offsets=offsets, workspace=workspace, cu_seqlens_cpu=p.cu_seqlens, batch_invariant=True,
        )  # fmt: skip
        return out

    p = p.replace(q=p.q * 0.03, k=p.k * 0.03)
    beta, g = torch.sigmoid(p.beta.float()) / 2, -torch.rand_like(p.g.float())
    got, expected = ([pool.clone(), torch.zeros(3, 2, K, K), torch.zeros(3, 2, K, K)] for _ in range(2))
    workspace = torch.empty(64, dtype=torch.uint8)
    expected_out = call(beta, g, *expected, workspace)
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(beta, g, *got, workspace)
    cases.check_same(out, expected_out, "out")
    for tensor, right, before in zip(got, expected, [pool, torch.zeros(()), torch.zeros(())]):
        cases.check_same(tensor, right, "written")
        assert not torch.equal(tensor, before.expand_as(tensor))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export(strict: bool) -> None:
    exported = torch.export.export(Program(), tuple(tensors()), strict=strict)
    assert [node.target for node in exported.graph.nodes].count(OP) == 1
    check_same_as_eager(exported.module())


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    arguments = tensors()
    torch.export.save(torch.export.export(Program(), tuple(arguments)), tmp_path / "program.pt2")
    expected_state = arguments[-1].clone()
    expected_out, _ = program(*arguments[:-1], expected_state)
    torch.save(arguments, tmp_path / "arguments.pt")
    script = """
import sys
import torch
import flash_kda.ops  # all that it takes
module = torch.export.load(sys.argv[1] + "/program.pt2").module()
arguments = torch.load(sys.argv[1] + "/arguments.pt")
out, _ = module(*arguments)
torch.save([out, arguments[-1]], sys.argv[1] + "/results.pt")
"""
    parent = str(Path(flash_kda.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": parent},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out, state = torch.load(tmp_path / "results.pt")
    cases.check_same(out, expected_out, "out")
    cases.check_same(state, expected_state, "state")


def test_make_fx() -> None:
    graph = make_fx(program)(*tensors())
    assert [node.target for node in graph.graph.nodes].count(OP) == 1
    check_same_as_eager(graph)


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors()]
        out, state = program(*fakes)
    outside, _ = flash_kda.fwd(
        *fakes[:5], 0.1, None, *fakes[5:7], -5.0
    )  # a fake tensor stays one when its mode has ended
    for result in (out, outside):
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.dtype, result.is_contiguous()) == ((1, 40, 2, K), BF16, True)
    assert state is fakes[-1]


def test_a_dispatch_mode_sees_the_operator() -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            seen.append(function)
            return function(*arguments, **(options or {}))

    def recorded(*arguments: Any) -> Any:
        with Recorder(), Recorder():
            return program(*arguments)

    check_same_as_eager(recorded)
    assert seen.count(OP) == 2


def test_opcheck() -> None:
    q, k, v, g, beta, A_log, dt_bias, state = tensors()
    results = torch.library.opcheck(
        OP, (q, k, v, g, beta, 0.1, torch.zeros_like(v), None, A_log, dt_bias, -5.0, state, torch.zeros_like(state)),
        {"intermediate_states": torch.zeros(1, 2, K, K), "batch_invariant": True},
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}
    assert torch.library.opcheck(torch.ops.flash_kda.get_workspace_size.default, (100, 2, 1), test_utils="test_schema")


def test_errors_come_when_the_program_runs() -> None:
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    arguments = tensors()
    arguments[4] = arguments[4].half()
    with pytest.raises(TypeError, match=r"^beta: expected bfloat16"):
        compiled(*arguments)


# ---- eager calls


def test_eager_calls_do_not_pass_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda import device_code, forward

    monkeypatch.setattr(ops, "trace", lambda *_, **__: pytest.fail("traced"))
    module = fake_native.FakeNative()
    monkeypatch.setattr(device_code, "_module", module)
    monkeypatch.setattr(forward, "_native", None)
    monkeypatch.setattr(forward, "_current_stream", lambda device: 7000 + device)
    program(*tensors())
    flash_kda.fwd(*(torch.nn.Parameter(t, requires_grad=False) for t in tensors()[:5]), 0.1, None, None, None, -5.0)
    moved = [fake_native.on_fake_gpu(tensor) for tensor in tensors()]
    out = fake_native.on_fake_gpu(torch.empty(1, 40, 2, K, dtype=BF16))
    flash_kda.fwd(*moved[:5], 0.1, out, *moved[5:7], -5.0)
    assert len(module.calls) == 1


def test_the_operator_runs_what_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer may run an operator for real while it traces; the call inside must not be recorded again."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_same_as_eager(program)
    assert not getattr(ops._thread, "running", False)


def test_threads_trace_on_their_own() -> None:
    ops._thread.running = True
    try:
        answers: list[bool] = []

        def ask() -> None:
            with FakeTensorMode():
                answers.append(ops.is_traced(torch.zeros(1)))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert answers == [True]
    finally:
        ops._thread.running = False


# ---- derivatives


NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_a_gradient_is_refused(name: str, way: str) -> None:
    arguments = dict(zip(NAMES, tensors()))
    arguments[name].requires_grad_()
    state = arguments.pop("state")

    def call() -> Any:
        rows = [arguments[n] for n in NAMES[:5]]
        if way == "operator":
            out = torch.empty(1, 40, 2, K, dtype=BF16)
            return OP(*rows, 0.1, out, None, arguments["A_log"], arguments["dt_bias"], -5.0, state)
        return flash_kda.fwd(*rows, 0.1, None, arguments["A_log"], arguments["dt_bias"], -5.0, state)

    if way == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = "initial_state" if name == "state" else name
    with pytest.raises(Exception, match=f"{expected} requires a gradient, and flash_kda.fwd computes none") as caught:
        call()
    assert way == "compiled" or type(caught.value) is RuntimeError
    with torch.no_grad():
        call()


def test_a_tangent_is_refused() -> None:
    q, k, v, g, beta, A_log, dt_bias, _ = tensors()
    out = torch.empty_like(v)
    with forward_ad.dual_level():
        flash_kda.fwd(q, k, v, g, beta, 0.1, out, A_log, dt_bias, -5.0)
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        for mode in (torch.no_grad, torch.enable_grad):
            with (
                mode(),
                pytest.raises(RuntimeError, match=r"^v carries a tangent, and flash_kda.fwd computes no deriv"),
            ):
                flash_kda.fwd(q, k, dual, g, beta, 0.1, out, A_log, dt_bias, -5.0)
        with pytest.raises(RuntimeError, match=r"^v carries a tangent"):
            OP(q, k, dual, g, beta, 0.1, out, None, A_log, dt_bias, -5.0)
        flash_kda.fwd(q, k, forward_ad.unpack_dual(dual).primal, g, beta, 0.1, out, A_log, dt_bias, -5.0)


def test_functional_transforms_are_refused() -> None:
    q, k, v, g, beta, A_log, dt_bias, _ = tensors()

    def out_of(v: Any) -> Any:
        return flash_kda.fwd(q, k, v, g, beta, 0.1, None, A_log, dt_bias, -5.0)[0]

    with pytest.raises(RuntimeError, match="v carries a tangent"):
        torch.func.jvp(out_of, (v,), (torch.ones_like(v),))
    with pytest.raises(RuntimeError, match="v requires a gradient"):
        torch.func.grad(lambda v: out_of(v).float().sum())(v)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for flash_kda::fwd"):
        torch.func.vmap(out_of)(torch.stack([v, v]))
