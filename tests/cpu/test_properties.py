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
    """Any form of gate, beta, q and k, heads and layout."""
    group = draw(st.sampled_from([1, 1, 2, 3]))
    H = group * draw(st.integers(1, 2 if group > 1 else 3))
    gate = draw(st.sampled_from([cases.STRONG, cases.WEAK, cases.WEAKEST]))
    seed = draw(st.integers(0, 1000))
    initial = draw(dtypes)
    if draw(st.booleans()):
        batch = (draw(st.integers(0, 3)), draw(st.integers(0, 40)))
        problem = cases.make("cpu", None, H, gate, batch=batch, initial=initial, seed=seed, group=group)
    else:
        lengths = draw(st.lists(st.integers(0, 40), min_size=2, max_size=6))
        offsets = draw(st.sampled_from([torch.int32, torch.int64]))
        slack = draw(st.integers(0, 5))
        problem = cases.make(
            "cpu", lengths, H, gate, initial=initial, offsets=offsets, slack=slack, seed=seed, group=group
        )
    problem.lower_bound = draw(st.floats(-5.0, -1e-3))
    problem.scale = draw(st.one_of(st.just(0.0), st.floats(1e-3, 2.0), st.floats(-2.0, -1e-3)))
    kind = draw(st.sampled_from(["bounded", "unbounded", "log-decay"]))
    if kind == "log-decay":
        problem = cases.without_gate(problem, draw(st.sampled_from([0.01, 1.0, 300.0])) * cases.log_decays(problem))
    elif kind == "unbounded":
        problem.lower_bound = None
        problem.g.mul_(draw(st.sampled_from([1.0, 100.0])))
    if kind != "log-decay":
        problem.A_log = draw(st.sampled_from([problem.A_log, None]))
        problem.dt_bias = draw(st.sampled_from([problem.dt_bias, problem.dt_bias.flatten(), None]))
    if draw(st.booleans()):
        problem.g = problem.g.to(draw(st.sampled_from([FP32, BF16])))
    if draw(st.booleans()):
        problem.beta = problem.beta.to(draw(st.sampled_from([FP32, BF16])))
    if draw(st.booleans()):
        problem.options["use_beta_sigmoid_in_kernel"] = False
        problem.beta = problem.beta.sigmoid()
    if draw(st.booleans()):
        problem.options["use_qk_l2norm_in_kernel"] = False
        problem.q, problem.k = (
            torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (problem.q, problem.k)
        )
    if draw(st.booleans()):
        problem.options["allow_neg_eigval"] = True
    same = group == 1 and problem.g.dtype is BF16 and problem.beta.dtype is BF16
    if same and draw(st.booleans()):
        problem, _ = cases.fused_slices("cpu", problem, draw(st.sampled_from([None, 3, 12])))
    return problem


@FEW
@given(problem=problems(), final=dtypes)
def test_right_calls(problem: cases.Problem, final: Any) -> None:
    cases.check_against_oracle("", problem, 5e-3, final, kind="recurrent")


@FEW
@given(problem=problems(), data=st.data())
def test_right_states(problem: cases.Problem, data: Any) -> None:
    """Pools, K-first states, states saved on the way and hints, against the oracle of each sequence alone."""
    N, H = problem.N, problem.H
    v_first, state_dtype, saved_dtype = data.draw(st.booleans()), data.draw(dtypes) or FP32, data.draw(dtypes) or FP32
    rows = N + 2
    indices = torch.tensor(data.draw(st.permutations([*range(rows - 2), -1, -1, rows + 3]))[:N], dtype=torch.int64)
    bounds = problem.cu_seqlens
    T = problem.q.shape[1]
    lengths = [T] * N if bounds is None else bounds.diff().tolist()
    if bounds is not None and data.draw(st.booleans()):
        lengths_hint = {"cu_seqlens_cpu": bounds.clone()}
    else:
        lengths_hint = {}

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x if v_first else x.transpose(-1, -2)

    pool = torch.randn(rows, H, K, K).to(state_dtype)
    before = pool.clone()
    offsets = torch.tensor([[16, 16 * (length // 16)] for length in lengths], dtype=torch.int32).view(N, 2)
    snapshots = torch.full((sum(-(-length // 64) for length in lengths), H, K, K), 7.0, dtype=saved_dtype)
    marks = torch.full((N, 2, H, K, K), 7.0, dtype=saved_dtype)
    held = problem.replace(initial_state=pool)
    out, _ = cases.call(
        held, None, pool, state_indices=indices.to(data.draw(st.sampled_from([torch.int32, torch.int64]))),
        state_v_first=v_first, intermediate_states=snapshots, checkpoint_states=marks, checkpoint_offsets=offsets,
        batch_invariant=data.draw(st.booleans()), **lengths_hint,
    )  # fmt: skip
    untouched = [row for row in range(rows) if row not in indices.tolist()]
    assert torch.equal(pool[untouched], before[untouched])
    row = 0
    for n, length in enumerate(lengths):
        has_row = 0 <= int(indices[n]) < rows
        begin = 0 if bounds is None else int(bounds[n])

        def after(
            tokens: int, n: int = n, begin: int = begin, has_row: bool = has_row
        ) -> tuple[torch.Tensor, torch.Tensor]:
            alone = problem.part(begin, begin + tokens)
            if bounds is None:
                alone = alone.replace(**{name: getattr(alone, name)[n : n + 1] for name in cases.ROWS})
            initial = turned(before[int(indices[n])]) if has_row else torch.zeros(H, K, K)
            alone_out, state = cases.oracle(alone.replace(initial_state=initial.unsqueeze(0)))
            return alone_out, state[0]

        expected_out, expected = after(length)
        where = (slice(n, n + 1), slice(None)) if bounds is None else (slice(None), slice(begin, begin + length))
        assert cases.distance(out[where], expected_out) < 5e-3
        if has_row:
            assert cases.distance(turned(pool[int(indices[n])]), expected) < 5e-3
        for tokens in range(0, length, 64):
            assert cases.distance(turned(snapshots[row]), after(tokens)[1]) < 5e-3
            row += 1
        for mark, offset in zip(marks[n], offsets[n].tolist()):
            if 0 < offset <= length:
                assert cases.distance(turned(mark), after(offset)[1]) < 5e-3
            else:
                assert bool((mark == 7.0).all())
    assert row == len(snapshots)


# How a call goes wrong: argument -> a function of the right value and the problem that gives a wrong one.
WRONG: dict[str, list[Any]] = {
    "q": [lambda x, p: x.float(), lambda x, p: x[..., :64], lambda x, p: x.unsqueeze(0), lambda x, p: None],
    "k": [
        lambda x, p: x.half(),
        lambda x, p: x[:, :, :, ::2],
        lambda x, p: torch.cat([x, x], 2),
        lambda x, p: x.to("meta"),
    ],
    "v": [lambda x, p: x.int(), lambda x, p: torch.cat([x, x], 3), lambda x, p: x.tolist(), lambda x, p: x[:, :, :0]],
    "g": [lambda x, p: x.half(), lambda x, p: x[..., 0], lambda x, p: x.unsqueeze(1)],
    "beta": [lambda x, p: x.half(), lambda x, p: x.unsqueeze(-1), lambda x, p: p.q],
    "A_log": [lambda x, p: torch.zeros(p.H).to(BF16), lambda x, p: torch.zeros(p.H + 1), lambda x, p: torch.zeros(1, p.H)],
    "dt_bias": [lambda x, p: torch.zeros(p.H, K).double(), lambda x, p: torch.zeros(1, p.H, K), lambda x, p: torch.zeros(p.H, 64)],
    "scale": [lambda x, p: float("nan"), lambda x, p: "1", lambda x, p: torch.tensor(x)],
    "lower_bound": [lambda x, p: 5.0, lambda x, p: -5.001, lambda x, p: True],
    "initial_state": [lambda x, p: torch.zeros(p.N + 1, p.H, K, K), lambda x, p: torch.zeros(p.N, p.H, K, 64)],
    "final_state": [lambda x, p: torch.zeros(p.N, p.H, K, K).half(), lambda x, p: torch.zeros(p.N, p.H, K)],
    "cu_seqlens": [lambda x, p: torch.zeros(1, 2).long(), lambda x, p: [0, 1], lambda x, p: torch.zeros(0).int()],
    "state_indices": [lambda x, p: torch.zeros(p.N + 1).int(), lambda x, p: torch.zeros(p.N), lambda x, p: list(range(p.N))],
    "intermediate_states": [lambda x, p: torch.zeros(p.q.numel(), p.H + 1, 1, 1), lambda x, p: True],
    "checkpoint_states": [lambda x, p: torch.zeros(p.N, p.H, K, 64), lambda x, p: x.double(), lambda x, p: None],
    "checkpoint_offsets": [lambda x, p: x.float(), lambda x, p: x.unsqueeze(0), lambda x, p: None],
    "workspace": [lambda x, p: torch.zeros(64), lambda x, p: 64],
    "cu_seqlens_cpu": [lambda x, p: torch.full((p.N + 1,), 10**6), lambda x, p: [0] * p.N],
    **{
        name: [lambda x, p: None, lambda x, p: 1, lambda x, p: "True"]
        for name in (
            "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
            "batch_invariant",
        )
    },
}  # fmt: skip


@MANY
@given(problem=problems(), data=st.data())
def test_wrong_calls(problem: cases.Problem, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(WRONG)))
    spoil = data.draw(st.sampled_from(WRONG[name]))
    p = problem
    if name in ("A_log", "dt_bias", "lower_bound"):  # without a gate anything but None is wrong, and says so instead
        p.options.pop("use_gate_in_kernel", None)
    # A wrong state would be a right pool.
    pooled = name not in ("initial_state", "final_state", "state_indices") and data.draw(st.booleans())
    written = {
        "out": torch.full(p.v.shape, 7.0, dtype=BF16), "final_state": torch.full((p.N + 2 * pooled, p.H, K, K), 7.0),
        "intermediate_states": torch.full((3, p.H, K, K), 7.0), "checkpoint_states": torch.full((p.N, p.H, K, K), 7.0),
    }  # fmt: skip
    call = {
        "q": p.q, "k": p.k, "v": p.v, "g": p.g, "beta": p.beta, "scale": p.scale, "A_log": p.A_log, "dt_bias": p.dt_bias,
        "lower_bound": p.lower_bound, "initial_state": p.initial_state, "cu_seqlens": p.cu_seqlens,
        "checkpoint_offsets": torch.full((p.N,), 16), **p.options, **written,
    }  # fmt: skip
    if pooled:
        call.update(initial_state=written["final_state"], state_indices=torch.arange(p.N))
    call[name] = spoil(call.get(name), p)
    with pytest.raises((TypeError, ValueError)) as caught:
        flash_kda.fwd(**call)
    # A wrong q, v, or cu_seqlens may show first in an argument that has to fit it, and one of a pair in the other.
    blamed = str(caught.value).split(":")[0]
    assert blamed == name or (name in ("q", "v", "cu_seqlens") and blamed in call), str(caught.value)
    for what, tensor in written.items():
        assert bool((tensor == 7.0).all()), f"{what} was written"


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
