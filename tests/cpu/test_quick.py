"""The call's short way, taken apart in C++: what it takes, ``checks.check`` accepts with the same result; all else it leaves alone, silently."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import test_checks  # noqa: E402
import test_properties  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flash_kda import checks, device_code  # noqa: E402

NAMES = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "scale",
    "out",
    "A_log",
    "dt_bias",
    "lower_bound",
    "initial_state",
    "final_state",
    "cu_seqlens",
)
TENSORS = tuple(name for name in NAMES if name not in ("scale", "lower_bound"))
# Of test_checks.ACCEPTED: forms that only the long way takes, though no option tells them.
LEFT_ALONE = {
    "out=None", "int scale", "numpy numbers", "int lower_bound", "a row's tail as out", "head-major slices of one buffer", "padded rows",
    "rows of any width and address", "slices of one buffer, out among them", "states beside one another in a pool",
}  # fmt: skip


assert test_checks.ACCEPTED.keys() >= LEFT_ALONE


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        module = device_code.native()
    except RuntimeError as error:
        pytest.skip(f"not built: {error}")
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if api is None:
        pytest.skip("this torch does not give tensors to C")
    assert module.quick_setup(torch.Tensor, torch.nn.Parameter, api)
    return module


def quick(native: Any, call: dict[str, Any]) -> Any:
    return native.quick_arguments(*(call[name] for name in NAMES), torch.is_grad_enabled())


def alike(taken: Any, call: dict[str, Any]) -> None:
    """The same launch, but for the strides of dimensions of one, which are never used, and numbers in fp32."""
    expected = list(checks.check(**call))
    assert expected[-3:] == [None] * 3
    got = list(taken)
    B, T, H, HV = expected[12:16]
    for place, heads in zip(range(6, 12), (H, H, HV, HV, HV, HV)):
        for strides in (got, expected):
            strides[place] = tuple(0 if size == 1 else step for step, size in zip(strides[place], (B, T, heads)))
    for place in (27, 28):
        assert (got[place] is None) is (expected[place] is None)
        if got[place] is not None:
            expected[place] = torch.tensor(expected[place], dtype=torch.float32).item()
    for absent, dtype_and_row in ((19, (20, 21)), (22, (23, 24))):
        if expected[absent] == 0:
            for place in dtype_and_row:
                got[place] = expected[place]
    assert got == expected[:-3]


def usual(change: dict[str, Any]) -> bool:
    return change.keys() <= set(NAMES)


@pytest.mark.parametrize("name", test_checks.ACCEPTED)
def test_what_it_takes(name: str, native: Any) -> None:
    change = test_checks.ACCEPTED[name]()
    call = test_checks.arguments(**change)
    if not usual(change):
        pytest.skip("has options, which are no argument of it")
    taken = quick(native, call)
    assert (taken is None) is (name in LEFT_ALONE)
    if taken is not None:
        alike(taken, call)


@pytest.mark.parametrize("name", test_checks.REFUSED)
def test_what_is_wrong_is_left_to_the_long_way(name: str, native: Any) -> None:
    change = test_checks.REFUSED[name][0]()
    if not usual(change):
        pytest.skip("has options, which are no argument of it")
    assert quick(native, test_checks.arguments(**change)) is None


def test_parameters_of_a_model(native: Any) -> None:
    call = test_checks.arguments()
    for name in ("A_log", "dt_bias"):
        call[name] = torch.nn.Parameter(call[name])
    assert quick(native, call) is None  # a gradient is wanted
    with torch.no_grad():
        alike(quick(native, call), call)
    with torch.inference_mode():
        alike(quick(native, call), call)


def test_subclasses_are_left_alone(native: Any) -> None:
    class Own(torch.Tensor):
        pass

    for name in TENSORS:
        call = test_checks.arguments()
        call[name] = call[name].as_subclass(Own)
        assert quick(native, call) is None, name


def test_tensors_without_memory_are_left_alone(native: Any) -> None:
    for name in TENSORS:
        call = test_checks.arguments()
        call[name].untyped_storage().resize_(0)
        assert quick(native, call) is None, name
        call = test_checks.arguments()
        call[name] = call[name].to("meta")
        assert quick(native, call) is None, name


def test_it_launches_nothing_on_a_cpu(native: Any) -> None:
    call = test_checks.arguments()
    before = {name: call[name].clone() for name in TENSORS}
    assert native.quick(*(call[name] for name in NAMES), False) is False
    assert all(torch.equal(call[name], tensor) for name, tensor in before.items())
    with pytest.raises(TypeError, match="expected 14 arguments, got 2"):
        native.quick(call["q"], call["k"])


@st.composite
def changes(draw: Any, call: dict[str, Any]) -> dict[str, Any]:
    """One tensor, or its layout, other than it was; often wrongly so."""
    name = draw(st.sampled_from([name for name in TENSORS if call[name] is not None]))
    tensor = call[name]
    dims = st.integers(0, max(tensor.dim() - 1, 0))
    kind = draw(
        st.sampled_from(
            ["dtype", "dropped", "shorter", "transposed", "wider", "shared", "absent", "expanded", "object", "gradient"]
        )
    )
    if kind == "dtype":
        return {
            name: tensor.to(
                draw(
                    st.sampled_from(
                        [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
                    )
                )
            )
        }
    if kind == "dropped":
        return {name: tensor[0] if tensor.shape[0] else tensor.sum()}
    if kind == "shorter":
        dim = draw(dims)
        return {name: tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))}
    if kind == "transposed":
        return {name: tensor.transpose(draw(dims), draw(dims))}
    if kind == "wider":
        dim = draw(dims)
        shape = list(tensor.shape)
        shape[dim] += 3
        return {name: tensor.new_zeros(shape).narrow(dim, draw(st.integers(0, 3)), tensor.shape[dim])}
    if kind == "shared":
        other = call[draw(st.sampled_from(TENSORS))]
        return {name: other}
    if kind == "absent":
        return {name: None}
    if kind == "expanded":
        dim = draw(dims)
        return {name: tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape)}
    if kind == "gradient":
        return {name: tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor}
    return {name: draw(st.sampled_from([0, 1.0, "tensor", [1.0]]))}


@settings(max_examples=300, deadline=None)
@given(problem=test_properties.problems(), final=test_properties.dtypes, data=st.data())
def test_it_never_takes_what_is_refused(native: Any, problem: Any, final: Any, data: Any) -> None:
    states = None if final is None else torch.zeros(problem.N, problem.v.shape[2], 128, 128, dtype=final)
    call = {
        "q": problem.q, "k": problem.k, "v": problem.v, "g": problem.g, "beta": problem.beta, "scale": problem.scale,
        "out": torch.empty_like(problem.v, memory_format=torch.contiguous_format), "A_log": problem.A_log, "dt_bias": problem.dt_bias,
        "lower_bound": problem.lower_bound, "initial_state": problem.initial_state, "final_state": states, "cu_seqlens": problem.cu_seqlens,
    }  # fmt: skip
    if data.draw(st.booleans()):
        call |= data.draw(changes(call))
    taken = quick(native, call)
    try:
        checks.check(**call)
    except (TypeError, ValueError, RuntimeError):
        assert taken is None
        return
    if taken is not None:
        alike(taken, call)
