"""``is_available`` and ``explain``: right answers, with reasons, and never an exception."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("hypothesis")
torch = pytest.importorskip("torch")

import fake_native  # noqa: E402
import kda_cases as cases  # noqa: E402
from hypothesis import HealthCheck, given, settings, strategies  # noqa: E402
from kda_cases import BF16, WEAK  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import device_code, forward  # noqa: E402

A100 = ("NVIDIA A100", 8, 0)
H200 = ("NVIDIA H200", 9, 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_native.FakeNative:
    module = fake_native.FakeNative(gpus=(A100, H200))
    monkeypatch.setattr(device_code, "_module", module)
    monkeypatch.setattr(forward, "_native", None)
    return module


def call_on(device: str, **changes: Any) -> dict[str, Any]:
    p = cases.make("cpu", None, 2, WEAK, batch=(1, 40))
    call = {
        "q": p.q, "k": p.k, "v": p.v, "g": p.g, "beta": p.beta, "scale": 0.1, "out": None, "A_log": p.A_log,
        "dt_bias": p.dt_bias, "lower_bound": -5.0, **changes,
    }  # fmt: skip
    if device == "cuda":
        call = {name: fake_native.on_fake_gpu(value) for name, value in call.items()}
    return call


# ---- is_available


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)], ids=str)
def test_a_device_with_a_kernel(fake: fake_native.FakeNative, device: Any) -> None:
    answer = flash_kda.is_available(device)
    assert answer
    assert answer.reason == str(answer) == "sm90-wide: the best that fits this device"


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0"])
def test_a_device_without_a_kernel(fake: fake_native.FakeNative, device: Any) -> None:
    answer = flash_kda.is_available(device)
    assert not answer
    assert "A100" in answer.reason


def test_the_current_device_is_asked_about(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert flash_kda.is_available()
    assert flash_kda.is_available("cuda")
    assert not flash_kda.is_available(0)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", "kernels run on CUDA devices only, not on cpu"),
        ("no such device", "expected an index or a CUDA device, got 'no such device'"),
        (3.5, "expected an index or a CUDA device, got 3.5"),
        (7, "no device 7: the driver shows 2"),
        (-1, "no device -1"),
    ],
    ids=str,
)
def test_what_is_no_device_of_ours(fake: fake_native.FakeNative, device: Any, reason: str) -> None:
    answer = flash_kda.is_available(device)
    assert not answer
    assert reason in answer.reason


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "_module", fake_native.FakeNative(driver=False))
    assert not flash_kda.is_available()
    assert "no CUDA driver: libcuda.so.1" in flash_kda.is_available().reason


# ---- explain


def test_a_call_on_the_cpu() -> None:
    explanation = flash_kda.explain(**call_on("cpu"))
    assert explanation
    assert (explanation.path, explanation.segments) == ("reference", False)
    assert str(explanation).startswith("reference: CPU tensors")


def test_a_call_that_is_cut(fake: fake_native.FakeNative) -> None:
    fake.workspace_bytes = 640
    explanation = flash_kda.explain(**call_on("cuda"))
    assert (explanation.path, explanation.segments) == ("sm90-wide", True)
    assert "the best that fits this device; few and long sequences are cut" in explanation.reason
    assert fake.calls == [], "nothing is launched"


def test_calls_that_are_not_cut(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    small = flash_kda.explain(**call_on("cuda")).reason
    assert "it would not pay" in small
    assert "forgotten within 48 tokens do not wait" in small
    assert "forgotten" not in flash_kda.explain(**call_on("cuda", batch_invariant=True)).reason
    fake.workspace_bytes = 640
    states = torch.zeros(1, 2, 128, 128)
    for changes, reason in (
        ({"batch_invariant": True}, "batch invariance"),
        ({"enable_cp": False}, "batch invariance"),
        ({"intermediate_states": states}, "states inside of sequences"),
    ):
        explanation = flash_kda.explain(**call_on("cuda", **changes))
        assert (explanation.path, explanation.segments) == ("sm90-wide", False)
        assert reason in explanation.reason
    fake.workspace_bytes = 0
    monkeypatch.setenv("FLASH_KDA_SPLIT", "0")
    assert "FLASH_KDA_SPLIT=0" in flash_kda.explain(**call_on("cuda")).reason


def test_a_device_that_has_no_kernel(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_native, "DEVICE", 0)
    explanation = flash_kda.explain(**call_on("cuda"))
    assert not explanation
    assert explanation.path == "refused"
    assert "A100" in explanation.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": None}, "q: expected a torch.Tensor"),
        ({"lower_bound": -9.0}, "lower_bound: expected a number in [-5.0, 0)"),
        ({"beta": torch.zeros(1, 40, 2, dtype=torch.float16)}, "beta: expected bfloat16"),
        ({"transpose": True}, "unexpected keyword argument 'transpose'"),
        ({"batch_invariant": True, "enable_cp": True}, "enable_cp: expected None or False"),
        ({"workspace": torch.empty(16, dtype=torch.uint8)}, "workspace: expected at least 640 bytes, got 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_calls_that_are_refused(fake: fake_native.FakeNative, changes: dict[str, Any], reason: str) -> None:
    fake.workspace_bytes = 640
    explanation = flash_kda.explain(**call_on("cuda", **changes))
    assert not explanation
    assert reason in explanation.reason


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
JUNK = strategies.one_of(
    strategies.none(), strategies.booleans(), strategies.integers(), strategies.floats(), strategies.text(max_size=5),
    strategies.lists(strategies.integers(), max_size=3), strategies.builds(object),
    strategies.sampled_from([torch.zeros(()), torch.zeros(0), torch.zeros(1, 40, 2, 128), torch.zeros(2, device="meta"), torch]),
)  # fmt: skip


@UNHURRIED
@given(
    strategies.dictionaries(
        strategies.sampled_from(sorted(inspect.signature(flash_kda.fwd).parameters)), JUNK, max_size=4
    )
)
def test_explain_never_raises(changes: dict[str, Any]) -> None:
    explanation = flash_kda.explain(**call_on("cpu", **changes))
    assert explanation.reason
    assert bool(explanation) == (explanation.path == "reference")


@UNHURRIED
@given(JUNK)
def test_is_available_never_raises(device: Any) -> None:
    assert flash_kda.is_available(device).reason


def test_missing_arguments_are_named() -> None:
    assert "missing a required argument: 'q'" in flash_kda.explain().reason


def test_a_call_that_is_traced() -> None:
    with FakeTensorMode():
        explanation = flash_kda.explain(**{n: v for n, v in call_on("cpu").items() if n != "out"}, out=None)
    assert explanation
    assert explanation.path == "traced"


def test_what_explain_says_is_what_fwd_does(fake: fake_native.FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_current_stream", lambda device: 7000 + device)
    real = torch.empty
    for size in (0, 640):
        fake.workspace_bytes = size
        call = call_on("cuda", out=torch.empty(1, 40, 2, 128, dtype=BF16))
        assert flash_kda.explain(**call).segments == (size > 0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *a, device=None, **o: real(*a, **o))  # the workspace, on the fake GPU
            flash_kda.fwd(**call)
    assert [address != 0 for address in fake.workspaces] == [False, True]
