"""Random calls: what is right is computed right, what is wrong is refused by name, and nothing else happens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import kda_cases as cases  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kda_cases import BF16, FP32, K  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import checks  # noqa: E402

dtypes = st.sampled_from([None, FP32, BF16])
FEW = settings(max_examples=40, deadline=None)
MANY = settings(max_examples=400, deadline=None)

pytestmark = pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")


@st.composite
def problems(draw: Any) -> cases.Problem:
    H = draw(st.integers(1, 3))
    gate = draw(st.sampled_from([cases.STRONG, cases.WEAK, cases.WEAKEST]))
    seed = draw(st.integers(0, 1000))
    initial = draw(dtypes)
    if draw(st.booleans()):
        batch = (draw(st.integers(0, 3)), draw(st.integers(0, 40)))
        problem = cases.make("cpu", None, H, gate, batch=batch, initial=initial, seed=seed)
    else:
        lengths = draw(st.lists(st.integers(0, 40), min_size=2, max_size=6))
        offsets = draw(st.sampled_from([torch.int32, torch.int64]))
        slack = draw(st.integers(0, 5))
        problem = cases.make("cpu", lengths, H, gate, initial=initial, offsets=offsets, slack=slack, seed=seed)
    problem.lower_bound = draw(st.floats(-5.0, -1e-3))
    problem.scale = draw(st.one_of(st.just(0.0), st.floats(1e-3, 2.0), st.floats(-2.0, -1e-3)))
    if draw(st.booleans()):
        problem, _ = cases.fused_slices("cpu", problem)
    return problem


@FEW
@given(problem=problems(), final=dtypes)
def test_right_calls(problem: cases.Problem, final: Any) -> None:
    cases.check_against_oracle("", problem, 5e-3, final, kind="recurrent")


# How a call goes wrong: argument -> a function of the right value and the problem that gives a wrong one.
WRONG = {
    "q": [lambda x, p: x.float(), lambda x, p: x[..., :64], lambda x, p: x.unsqueeze(0), lambda x, p: None],
    "k": [
        lambda x, p: x.half(),
        lambda x, p: x[:, :, :, ::2],
        lambda x, p: torch.cat([x, x], 2),
        lambda x, p: x.to("meta"),
    ],
    "v": [lambda x, p: x.int(), lambda x, p: torch.cat([x, x], 3), lambda x, p: x.tolist()],
    "g": [lambda x, p: x.float(), lambda x, p: x[..., 0], lambda x, p: x.unsqueeze(1)],
    "beta": [lambda x, p: x.float(), lambda x, p: x.unsqueeze(-1), lambda x, p: p.q],
    "A_log": [lambda x, p: x.to(BF16), lambda x, p: torch.cat([x, x]), lambda x, p: x.view(1, -1)],
    "dt_bias": [lambda x, p: x.double(), lambda x, p: x.unsqueeze(0), lambda x, p: x[:, :64]],
    "scale": [lambda x, p: float("nan"), lambda x, p: "1", lambda x, p: torch.tensor(x)],
    "lower_bound": [lambda x, p: -x, lambda x, p: x - 5.0, lambda x, p: None],
    "initial_state": [lambda x, p: torch.zeros(p.N + 1, p.H, K, K), lambda x, p: torch.zeros(p.N, p.H, K, 64)],
    "final_state": [lambda x, p: torch.zeros(p.N, p.H, K, K).half(), lambda x, p: torch.zeros(p.N, p.H, K)],
    "cu_seqlens": [lambda x, p: torch.zeros(1, 2).long(), lambda x, p: [0, 1], lambda x, p: torch.zeros(0).int()],
}


@FEW
@given(problem=problems(), data=st.data())
def test_wrong_calls(problem: cases.Problem, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(WRONG)))
    spoil = data.draw(st.sampled_from(WRONG[name]))
    p = problem
    out = torch.full(p.q.shape, 7.0, dtype=BF16)
    state = torch.full((p.N, p.H, K, K), 7.0)
    call = {
        "q": p.q, "k": p.k, "v": p.v, "g": p.g, "beta": p.beta, "scale": p.scale, "out": out, "A_log": p.A_log,
        "dt_bias": p.dt_bias, "lower_bound": p.lower_bound, "initial_state": p.initial_state, "final_state": state,
        "cu_seqlens": p.cu_seqlens,
    }  # fmt: skip
    call[name] = spoil(call[name], p)
    with pytest.raises((TypeError, ValueError)) as caught:
        flash_kda.fwd(**call)
    # A wrong q (or cu_seqlens) may show first in an argument that has to fit it.
    blamed = str(caught.value).split(":")[0]
    assert blamed == name or (name in ("q", "cu_seqlens") and blamed in call), str(caught.value)
    assert bool((out == 7.0).all())
    assert bool((state == 7.0).all())


# ---- the memory rules, against counting elements one by one


def elements(tensor: torch.Tensor, base: int = 0) -> list[int]:
    """Position of each element, in units of elements."""
    start = tensor.storage_offset() - base
    ranges = [
        range(0, size * stride, stride) if stride else [0] * size for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return [start + sum(steps) for steps in itertools.product(*ranges)]


@st.composite
def views(draw: Any, memory: torch.Tensor) -> torch.Tensor:
    dims = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))
    strides = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]), min_size=dims, max_size=dims))
    offset = draw(st.integers(0, 40))
    return memory.as_strided(shape, strides, offset)


MEMORY = torch.zeros(512)


@MANY
@given(a=views(MEMORY), b=views(MEMORY))
def test_shared_memory_is_always_seen(a: torch.Tensor, b: torch.Tensor) -> None:
    if set(elements(a)) & set(elements(b)):
        with pytest.raises(ValueError, match="a: expected memory of its own, but it overlaps b"):
            checks._check_overlap("a", a, {"b": b})


@MANY
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(*[st.sampled_from([0, 64, 128, 136, 256, 384, 512, 1024])] * 3),
)
def test_rows_that_share_memory_are_always_seen(shape: Any, strides: Any) -> None:
    out = torch.zeros(8192, dtype=BF16).as_strided((*shape, K), (*strides, 1))
    places = elements(out)
    if len(set(places)) < len(places):
        with pytest.raises(ValueError, match="out: expected rows of memory of their own"):
            checks._check_rows_distinct(out)
