"""``fwd`` from arguments to launch: on CPU tensors, and through a fake compiled module that computes with what it is handed."""

from __future__ import annotations

import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_native  # noqa: E402
import kda_cases as cases  # noqa: E402
from kda_cases import BF16, FP32, WEAK  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import device_code, forward  # noqa: E402

FIELDS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_native.FakeNative:
    module = fake_native.FakeNative()
    monkeypatch.setattr(device_code, "_module", module)
    monkeypatch.setattr(forward, "_native", None)
    monkeypatch.setattr(forward, "_current_stream", lambda device: 7000 + device)
    return module


def moved(problem: cases.Problem) -> cases.Problem:
    return problem.replace(**{name: fake_native.on_fake_gpu(getattr(problem, name)) for name in FIELDS})


def call(problem: cases.Problem, out: Any, final_state: Any, **extras: Any) -> Any:
    p = problem
    return flash_kda.fwd(
        p.q, p.k, p.v, p.g, p.beta, p.scale, out, p.A_log, p.dt_bias, p.lower_bound,
        initial_state=p.initial_state, final_state=final_state, cu_seqlens=p.cu_seqlens, **extras,
    )  # fmt: skip


# ---- CPU tensors


def test_the_cpu_path_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_warned_cpu", False)
    problem = cases.make("cpu", [20], 1)
    with pytest.warns(UserWarning, match="CPU tensors") as caught:
        call(problem, None, None)
    assert caught[0].filename == __file__, "the warning points at the caller of fwd"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(problem, None, None)


@pytest.mark.parametrize("final", [None, FP32, BF16])
def test_results_are_written_in_place(final: torch.dtype | None) -> None:
    problem = cases.make("cpu", [20, 5], 2, WEAK, initial=FP32, slack=3)
    out = torch.full_like(problem.q, 7.0)
    state = None if final is None else torch.full((2, 2, 128, 128), 7.0, dtype=final)
    got = call(problem, out, state)
    assert got[0] is out
    assert got[1] is state
    expected_out, expected_state = cases.oracle(problem, "recurrent")
    assert cases.distance(out[:, :25], expected_out[:, :25]) < 3e-3
    assert bool((out[:, 25:] == 7.0).all()), "rows beyond the last offset stay as they were"
    if state is not None:
        assert cases.distance(state, expected_state) < 3e-3


def test_out_is_allocated() -> None:
    problem = cases.make("cpu", [20], 2)
    out, state = call(problem, None, None)
    assert state is None
    assert out.dtype is BF16
    assert out.is_contiguous()
    assert cases.distance(out, cases.oracle(problem)[0]) < 3e-3


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.autocast("cpu", dtype=BF16), lambda: torch.device("meta")],
    ids=["autocast", "default device"],
)
def test_modes_of_the_caller_do_not_reach_the_reference(mode: Any) -> None:
    problem = cases.make("cpu", [20, 5], 2, WEAK)
    states = [torch.zeros(2, 2, 128, 128) for _ in range(2)]
    expected, _ = call(problem, None, states[0])
    with mode():
        out, _ = call(problem, None, states[1])
    assert torch.equal(out, expected)
    assert torch.equal(*states)


@pytest.mark.parametrize("which", ["out", "final_state"])
def test_inference_tensors_are_written_outside_of_inference_mode(which: str) -> None:
    """As the kernel does, which knows nothing of torch's modes; and never one result without the other."""
    problem = cases.make("cpu", [20], 2)
    results = {"out": torch.zeros_like(problem.q), "final_state": torch.zeros(1, 2, 128, 128)}
    with torch.inference_mode():
        results[which] = results[which].clone()
    call(problem, **results)
    expected_out, expected_state = cases.oracle(problem)
    assert cases.distance(results["out"], expected_out) < 3e-3
    assert cases.distance(results["final_state"], expected_state) < 3e-3


# ---- through the fake module


LAYOUTS = ["dense", "fused", "head-major"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("initial", [None, FP32, BF16], ids=["no initial", "initial fp32", "initial bf16"])
@pytest.mark.parametrize("final", [None, FP32, BF16], ids=["no final", "final fp32", "final bf16"])
@pytest.mark.parametrize("shape", ["batch", "int32", "int64"])
def test_what_is_handed_to_the_kernel(
    fake: fake_native.FakeNative, layout: str, initial: Any, final: Any, shape: str
) -> None:
    if shape == "batch":
        problem = cases.make("cpu", None, 3, WEAK, batch=(2, 21), initial=initial)
    else:
        offsets = {"int32": torch.int32, "int64": torch.int64}[shape]
        problem = cases.make("cpu", [9, 0, 12], 3, WEAK, initial=initial, offsets=offsets)
    problem.scale, problem.lower_bound = 0.3, -2.5
    if layout == "fused":
        problem, _ = cases.fused_slices("cpu", problem)
    elif layout == "head-major":
        problem = problem.replace(
            **{
                n: getattr(problem, n).transpose(1, 2).contiguous().transpose(1, 2)
                for n in ("q", "k", "v", "g", "beta")
            }
        )
    expected_out, expected_state = cases.oracle(problem)
    B, T, H, K = problem.q.shape
    wide = torch.full((B, T, 2 * H * K), 7.0, dtype=BF16)
    out = fake_native.on_fake_gpu(wide[..., H * K :].unflatten(-1, (H, K)))
    state = None if final is None else fake_native.on_fake_gpu(torch.full((problem.N, H, K, K), 7.0, dtype=final))
    got_out, got_state = call(moved(problem), out, state)
    assert got_out is out
    assert got_state is state
    assert fake.calls == [(1, 7001)], "launched once, on the tensors' device and its current stream"
    assert cases.distance(wide[..., H * K :].unflatten(-1, (H, K)), expected_out) < 3e-3
    assert bool((wide[..., : H * K] == 7.0).all())
    if state is not None:
        assert cases.distance(state.as_subclass(torch.Tensor), expected_state) < 3e-3


@pytest.fixture
def moved_calls(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> fake_native.FakeNative:
    """Calls of ``flash_kda.fwd`` go through the fake module, with all tensors said to lie on its GPU."""
    right = flash_kda.fwd

    def fwd(*arguments: Any, **named: Any) -> Any:
        given_out, given_state = arguments[6], arguments[11]
        out, _ = right(
            *(fake_native.on_fake_gpu(x) for x in arguments),
            **{name: fake_native.on_fake_gpu(x) for name, x in named.items()},
        )
        return out.as_subclass(torch.Tensor) if given_out is None else given_out, given_state

    monkeypatch.setattr(flash_kda, "fwd", fwd)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **named: real(*size, **named))
    return fake


@pytest.mark.parametrize("name", cases.forms("cpu", [20, 5]))
def test_forms_are_handed_to_the_kernel(name: str, moved_calls: fake_native.FakeNative) -> None:
    cases.check_against_oracle("", cases.forms("cpu", [20, 5])[name], cases.FORM_LIMIT)
    assert len(moved_calls.calls) == 1


@pytest.mark.parametrize(
    "check",
    [
        lambda: cases.check_fused_slices("cpu", 20, 3, spare=12, shift=1),
        lambda: cases.check_mixed_layouts("cpu"),
        lambda: cases.check_key_first_states("cpu"),
        lambda: cases.check_pools("cpu"),
        lambda: cases.check_all_saved_states("cpu"),
    ],
    ids=["fused slices", "mixed layouts", "key-first states", "pools", "saved states"],
)
def test_layouts_and_states_are_handed_to_the_kernel(check: Any, moved_calls: fake_native.FakeNative) -> None:
    check()
    assert moved_calls.calls


def test_a_workspace_of_the_callers_is_used(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.workspace_bytes = 640
    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.full((1, 20, 2, 128), 7.0, dtype=BF16))
    workspace = fake_native.on_fake_gpu(torch.empty(1000, dtype=torch.uint8))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    call(problem, out, None, workspace=workspace)
    assert fake.workspaces == [workspace.data_ptr()]
    out.fill_(7.0)
    with pytest.raises(ValueError, match="workspace: expected at least 640 bytes, got 639"):
        call(problem, out, None, workspace=workspace[:639])
    assert bool((out.as_subclass(torch.Tensor) == 7.0).all())


@pytest.mark.parametrize("why", ["nothing", "batch_invariant", "intermediate_states", "checkpoint_states"])
def test_calls_that_must_not_be_cut_say_so(why: str, fake: fake_native.FakeNative) -> None:
    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.zeros(1, 20, 2, 128, dtype=BF16))
    states = fake_native.on_fake_gpu(torch.zeros(1, 2, 128, 128))
    extras: dict[str, Any] = {} if why == "nothing" else {why: True if why == "batch_invariant" else states}
    if why == "checkpoint_states":
        extras["checkpoint_offsets"] = fake_native.on_fake_gpu(torch.tensor([16]))
    call(problem, out, None, **extras)
    assert fake.asked is not None
    assert fake.asked[-1] is (why != "nothing")


def test_out_is_allocated_on_the_device_of_q(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cpu", [20], 2)
    real = torch.empty
    seen = []

    def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
        seen.append(device)
        return fake_native.on_fake_gpu(real(tuple(shape), dtype=dtype).fill_(float("nan")))

    monkeypatch.setattr(torch, "empty", empty)
    out, _ = call(moved(problem), None, None)
    monkeypatch.undo()
    assert seen == [torch.device("cuda", 1)]
    assert cases.distance(out.as_subclass(torch.Tensor), cases.oracle(problem)[0]) < 3e-3


def test_the_native_module_is_looked_up_once(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.zeros(1, 20, 2, 128, dtype=BF16))
    call(problem, out, None)
    monkeypatch.setattr(device_code, "native", lambda: pytest.fail("looked up again"))
    call(problem, out, None)
    assert len(fake.calls) == 2


def test_an_error_of_the_kernel_selection_reaches_the_caller(
    fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*_: Any) -> None:
        raise RuntimeError("no code for this device is embedded")

    monkeypatch.setattr(fake, "forward", no_kernel, raising=False)
    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.full((1, 20, 2, 128), 7.0, dtype=BF16))
    with pytest.raises(RuntimeError, match="no code for this device"):
        call(problem, out, None)
    assert bool((out.as_subclass(torch.Tensor) == 7.0).all())


def test_the_workspace_lives_until_the_launch_has_returned(
    fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed before that, the allocator could hand it to another thread, whose work would come before the kernels."""
    fake.workspace_bytes = 640
    empty, compute, made = torch.empty, fake.forward, []

    def allocate(*size: Any, device: Any, **options: Any) -> torch.Tensor:
        assert device == torch.device("cuda", fake_native.DEVICE)
        tensor = empty(*size, **options)
        made.append((weakref.ref(tensor), tensor.data_ptr(), tensor.numel() * tensor.element_size()))
        return tensor

    def launch(*arguments: Any) -> None:
        (alive, address, size), asked = made[-1], arguments[-2:]
        assert asked == (address, size) == (address, 640)
        assert alive() is not None, "the workspace was freed before the launch"
        monkeypatch.setattr(torch, "empty", empty)
        compute(*arguments)

    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.full((1, 20, 2, 128), 7.0, dtype=BF16))
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(fake, "forward", launch, raising=False)
    call(problem, out, None)
    assert len(made) == len(fake.workspaces) == 1
    assert made[0][0]() is None, "and no longer"


def without_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "_module", None)
    monkeypatch.setattr(forward, "_native", None)
    monkeypatch.delattr(flash_kda, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "flash_kda._native", None)


def test_a_missing_module_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch)
    problem = moved(cases.make("cpu", [20], 2))
    out = fake_native.on_fake_gpu(torch.full((1, 20, 2, 128), 7.0, dtype=BF16))
    with pytest.raises(RuntimeError, match="flash_kda's compiled module"):
        call(problem, out, None)
    assert bool((out.as_subclass(torch.Tensor) == 7.0).all())
    assert not flash_kda.is_available()


def test_cpu_tensors_need_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch)
    problem = cases.make("cpu", [20], 2)
    out, _ = call(problem, None, None)
    assert cases.distance(out, cases.oracle(problem)[0]) < 3e-3


def test_a_module_that_does_not_load_gives_the_reason(tmp_path: Path) -> None:
    """The real import machinery on a damaged file, in a copy of the package."""
    package = Path(flash_kda.__file__).parent
    copy = tmp_path / "flash_kda"
    copy.mkdir()
    for source in package.glob("*.py"):
        (copy / source.name).write_bytes(source.read_bytes())
    program = "from flash_kda import device_code\ntry: device_code.native()\nexcept RuntimeError as error: print(error)"

    def reason() -> str:
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    assert "is missing" in reason()
    (copy / "_native.cpython-30-x86_64-linux-gnu.so").write_bytes(b"")
    assert "does not fit this Python: found _native.cpython-30" in reason()
    import sysconfig

    (copy / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    assert "does not load" in reason()
