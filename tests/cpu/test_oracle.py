"""The oracle against itself and against a numpy loop that shares no code with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import kda_cases as cases  # noqa: E402
from kda_cases import FP32, REGIME, STRONG, WEAK, WEAKEST  # noqa: E402

from flash_kda import reference  # noqa: E402

GATES = pytest.mark.parametrize("gate", [STRONG, WEAK, WEAKEST], ids=REGIME.get)


def by_hand(problem: cases.Problem) -> tuple[Any, Any]:
    """Loops over sequences, heads and tokens, one small numpy expression for each line of the definition."""

    def array(x: Any) -> Any:
        return x.detach().double().numpy()

    def chosen(name: str, default: bool) -> bool:
        return problem.options.get(name, default)

    q, k, v, g, beta = (array(x) for x in (problem.q, problem.k, problem.v, problem.g, problem.beta))
    B, T, H, V = v.shape
    K = q.shape[-1]
    group = H // q.shape[2]
    rate = np.ones(H) if problem.A_log is None else np.exp(array(problem.A_log))
    bias = np.zeros((H, K)) if problem.dt_bias is None else array(problem.dt_bias).reshape(H, -1)
    out = np.zeros((B, T, H, V))
    if problem.cu_seqlens is None:
        sequences = [(b, 0, T) for b in range(B)]
    else:
        offsets = problem.cu_seqlens.tolist()
        sequences = [(0, offsets[i], offsets[i + 1]) for i in range(len(offsets) - 1)]
    final = np.zeros((len(sequences), H, V, K))
    if problem.initial_state is not None:
        final[:] = array(problem.initial_state)

    def unit(x: Any) -> Any:
        return x / math.sqrt(float(np.dot(x, x)) + 1e-6) if chosen("use_qk_l2norm_in_kernel", True) else x

    def softplus(x: float) -> float:
        return math.log1p(math.exp(-abs(x))) + max(x, 0.0)

    def decay_of(x: Any, h: int) -> Any:
        if not chosen("use_gate_in_kernel", True):
            return np.exp(np.minimum(x, 0))
        if problem.lower_bound is None:
            return np.array([math.exp(-rate[h] * softplus(y)) for y in x + bias[h]])
        return np.exp(problem.lower_bound / (1 + np.exp(-rate[h] * (x + bias[h]))))

    def strength(x: float) -> float:
        x = 1 / (1 + math.exp(-x)) if chosen("use_beta_sigmoid_in_kernel", True) else x
        return 2 * x if chosen("allow_neg_eigval", False) else x

    for n, (b, begin, end) in enumerate(sequences):
        for h in range(H):
            S = final[n, h]
            for t in range(begin, end):
                key, query = unit(k[b, t, h // group]), unit(q[b, t, h // group])
                S = S * decay_of(g[b, t, h], h)[None, :]
                u = (v[b, t, h] - S @ key) * strength(beta[b, t, h])
                S = S + np.outer(u, key)
                out[b, t, h] = problem.scale * (S @ query)
            final[n, h] = S
    return out, final


@GATES
@pytest.mark.parametrize("kind", ["recurrent", "chunked"])
def test_against_numpy(kind: str, gate: float) -> None:
    for problem in (
        cases.make("cpu", [0, 1, 0, 17, 40, 0], 2, gate, initial=FP32, slack=2),
        cases.make("cpu", None, 2, gate, batch=(2, 33)),
    ):
        out, state = cases.oracle(problem, kind)
        expected_out, expected_state = by_hand(problem)
        assert out.dtype == state.dtype == torch.float64
        assert cases.distance(out, torch.from_numpy(expected_out)) < 1e-13
        assert cases.distance(state, torch.from_numpy(expected_state)) < 1e-13


@pytest.mark.parametrize("name", cases.forms("cpu", [20, 5]))
def test_forms_against_numpy(name: str) -> None:
    problem = cases.forms("cpu", [20, 5])[name]
    expected_out, expected_state = by_hand(problem)
    for kind in ("recurrent", "chunked"):
        out, state = cases.oracle(problem, kind)
        assert cases.distance(out, torch.from_numpy(expected_out)) < 1e-12
        assert cases.distance(state, torch.from_numpy(expected_state)) < 1e-12


def test_chunked_forms_are_accurate_in_fp32() -> None:
    """What the CPU path computes: the forms with decays down to nothing lose no digits."""
    for name, p in cases.forms("cpu", [40, 5]).items():
        arguments = (
            p.q,
            p.k,
            p.v,
            p.g,
            p.beta,
            p.scale,
            p.A_log,
            p.dt_bias,
            p.lower_bound,
            p.initial_state,
            p.cu_seqlens,
        )
        out, state = reference.chunked(*arguments, **p.options, dtype=torch.float32)
        expected_out, expected_state = reference.recurrent(*arguments, **p.options)
        assert cases.distance(out, expected_out) < 2e-5, name
        assert cases.distance(state, expected_state) < 2e-5, name


def test_parameters_of_a_gate_that_is_not_used_are_refused() -> None:
    problem = cases.make("cpu", [9], 2)
    for name in ("A_log", "dt_bias", "lower_bound"):
        others = {n: None for n in ("A_log", "dt_bias", "lower_bound") if n != name}
        with pytest.raises(ValueError, match="must be None with use_gate_in_kernel=False"):
            cases.oracle(problem.replace(**others, options={"use_gate_in_kernel": False}))


def test_other_head_dimensions() -> None:
    """The reference takes any K and V (the kernel does not)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    problem = cases.Problem(
        q=normal(1, 21, 2, 8), k=normal(1, 21, 2, 8), v=normal(1, 21, 2, 5), g=normal(1, 21, 2, 8), beta=normal(1, 21, 2),
        A_log=normal(2), dt_bias=normal(16), initial_state=normal(1, 2, 5, 8),
    )  # fmt: skip
    expected_out, expected_state = by_hand(problem)
    for kind in ("recurrent", "chunked"):
        out, state = cases.oracle(problem, kind)
        assert cases.distance(out, torch.from_numpy(expected_out)) < 1e-13
        assert cases.distance(state, torch.from_numpy(expected_state)) < 1e-13


@GATES
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_chunked_is_the_recurrence(gate: float, dtype: torch.dtype, limit: float) -> None:
    p = cases.make("cpu", [300, 5, 130, 0, 1], 2, gate, initial=FP32)
    arguments = (p.q, p.k, p.v, p.g, p.beta, p.scale, p.A_log, p.dt_bias, p.lower_bound, p.initial_state, p.cu_seqlens)
    out, state = reference.chunked(*arguments, dtype=dtype)
    expected_out, expected_state = reference.recurrent(*arguments)
    assert out.dtype == state.dtype == dtype
    assert cases.distance(out, expected_out) < limit
    assert cases.distance(state, expected_state) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_equal_keys(dtype: torch.dtype, limit: float) -> None:
    p = cases.equal_keys("cpu", 3000, 1)
    arguments = (p.q, p.k, p.v, p.g, p.beta, p.scale, p.A_log, p.dt_bias, p.lower_bound)
    out, state = reference.chunked(*arguments, dtype=dtype)
    expected_out, expected_state = reference.recurrent(*arguments)
    assert cases.distance(out, expected_out) < limit
    assert cases.distance(state, expected_state) < limit


def test_a_gate_that_is_open_everywhere_is_accurate() -> None:
    """exp(-80) within a chunk: a formulation with 1/A would lose the intra-chunk terms or overflow."""
    p = cases.make("cpu", [64], 2)
    p.g.fill_(1e4)
    arguments = (p.q, p.k, p.v, p.g, p.beta, p.scale, p.A_log, p.dt_bias, p.lower_bound)
    out, state = reference.chunked(*arguments, dtype=torch.float32)
    expected_out, expected_state = reference.recurrent(*arguments)
    assert cases.distance(out, expected_out) < 2e-6
    assert cases.distance(state, expected_state) < 2e-6


def test_block_boundaries_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cpu", [200, 90, 17], 2, WEAK, initial=FP32)
    whole_out, whole_state = cases.oracle(problem)
    monkeypatch.setitem(reference._BLOCK_ELEMENTS, "cpu", 1)  # one chunk at a time
    for kind in ("chunked", "recurrent"):
        out, state = cases.oracle(problem, kind)
        assert cases.distance(out, whole_out) < 1e-13
        assert cases.distance(state, whole_state) < 1e-13


def test_inputs_are_not_changed_and_no_gradient_is_recorded() -> None:
    problem = cases.make("cpu", [20, 3], 2, initial=FP32)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    before = {name: getattr(problem, name).clone() for name in names}
    problem.q.requires_grad_()
    for kind in ("chunked", "recurrent"):
        out, state = cases.oracle(problem, kind)
        assert not out.requires_grad
        assert not state.requires_grad
    for name in names:
        assert torch.equal(getattr(problem, name), before[name]), name


def test_clamped_offsets_and_rows_of_no_sequence() -> None:
    problem = cases.make("cpu", [30], 1).replace(cu_seqlens=torch.tensor([-5, 10, 8, 20, 99]))
    out, _ = cases.oracle(problem)
    tidy = problem.replace(cu_seqlens=torch.tensor([0, 10, 10, 10, 10]))
    assert torch.equal(out[:, :8], cases.oracle(tidy)[0][:, :8])
    part = problem.replace(
        **{name: getattr(problem, name)[:, 20:] for name in ("q", "k", "v", "g", "beta")}, cu_seqlens=None
    )
    assert cases.distance(out[:, 20:], cases.oracle(part)[0]) < 1e-14
    short = problem.replace(cu_seqlens=torch.tensor([3, 7]))
    zeros = cases.oracle(short)[0]
    assert bool((zeros[:, :3] == 0).all())
    assert bool((zeros[:, 7:] == 0).all())
    assert bool((zeros[:, 3:7] != 0).all())


WRONG_SHAPES = {
    "q": (1, 9, 128), "k": (1, 9, 3, 128), "v": (1, 9, 3, 128), "g": (1, 9, 2, 64), "beta": (1, 2, 9), "A_log": (3,),
    "dt_bias": (128, 2), "initial_state": (2, 2, 128, 128), "cu_seqlens": (2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_refused(name: str) -> None:
    problem = cases.make("cpu", [9], 2, initial=FP32)
    with pytest.raises(ValueError, match=name):
        cases.oracle(problem.replace(**{name: torch.zeros(WRONG_SHAPES[name])}))
