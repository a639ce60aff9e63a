"""flash-linear-attention's ``chunk_kda`` with the releases that the registry has: which backend runs, and is it right.

On CPU tensors both backends run the reference, and FLA's Triton kernels, which nothing else than a GPU can run, fail: so what was
declined shows. ``tests/gpu/test_engines.py`` runs the same session on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

LIMIT = 5e-3  # bf16 outputs and intermediate states of the CPU path

# Releases, each with the name of its own backend for this package.
BUILT_IN = {"0.5.0": "flashkda", "0.5.2": "flash_kda", "0.6.0": "flash_kda"}
OURS = "flash_kda.fla"

# After register(), by the name of the case in fla_session.py.
SERVED = [
    "as built in", "gradients recorded, none needed", "K-first", "grouped value heads", "negative eigenvalues",
    "unbounded gate", "no dt_bias", "no A_log", "A_log of a model", "activated beta, fp32", "log-decay, fp32",
    "int32 offsets", "intermediate states", "intermediate states, V-first", "positional", "transposed q",
]  # fmt: skip
DECLINED = {
    "a gradient is needed": "v requires a gradient",
    "an unknown option": "unknown options no_such_option",
    "half precision": "q: expected bfloat16, got float16",
    "head dimension 64": "q: expected [B, T, H, 128], got [1, 150, 2, 64]",
    "chunks of 32": "intermediate states lie 64 tokens apart, not chunk_size=32",
    "a bound out of range": "lower_bound: expected a number in [-5.0, 0)",
}

# A release, and whether torch is one that loses the choice of backends of 0.5.1 and 0.5.2.
SESSIONS = [*((version,) for version in BUILT_IN), ("0.5.2", "--old-torch")]
pytestmark = pytest.mark.parametrize("release", SESSIONS, ids=" ".join)


def ran_through(case: dict[str, Any], backend: str) -> None:
    assert case["log"][-1:] == [line for line in case["log"] if line.endswith(f"chunk_kda -> {backend}")], case["log"]
    assert case["fwd_calls"] == 1
    assert max(case["errors"]) < LIMIT, case["errors"]
    assert (case["out_dtype"], case["state_dtype"]) == ("torch.bfloat16", "torch.float32")


def ran_triton(case: dict[str, Any]) -> None:
    assert case["fwd_calls"] == 0
    assert "raised" in case  # there is no GPU that Triton could use


@pytest.mark.parametrize("case", ["built in", "built in, varlen"])
def test_fla_finds_this_package(fla_session: Any, release: tuple[str, ...], case: str) -> None:
    found = fla_session(*release)[case]
    if "--old-torch" in release:  # nothing is asked, nothing is logged
        ran_triton(found)
        assert found["log"] == []
    else:
        ran_through(found, BUILT_IN[release[0]])


@pytest.mark.parametrize("case", ["built in, opted out", "opted out"])
def test_opting_out(fla_session: Any, release: tuple[str, ...], case: str) -> None:
    found = fla_session(*release)[case]
    ran_triton(found)
    assert found["log"] == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [("built in, gradients recorded", "only supports inference mode"), ("built in, K-first", "=True")],
)
def test_what_fla_itself_keeps_from_us(fla_session: Any, release: tuple[str, ...], case: str, reason: str) -> None:
    found = fla_session(*release)[case]
    ran_triton(found)
    if "--old-torch" not in release:
        assert found["log"][-1].endswith(reason)
        assert f"-> {BUILT_IN[release[0]]} rejected" in found["log"][-1]


def test_fla_05_forgets_negative_eigenvalues(fla_session: Any, release: tuple[str, ...]) -> None:
    """Its own backend takes the option and drops it: why this package's comes first once it is registered."""
    found = fla_session(*release)["built in, negative eigenvalues"]
    if release in (("0.5.0",), ("0.5.2",)):
        assert found["fwd_calls"] == 1
        assert found["errors"][0] > 0.1
    else:
        ran_triton(found)


def test_registering(fla_session: Any, release: tuple[str, ...]) -> None:
    backends = fla_session(*release)["registry"]
    assert OURS in backends
    assert BUILT_IN[release[0]] in backends
    assert "probe" not in backends


@pytest.mark.parametrize("case", SERVED)
def test_what_is_served(fla_session: Any, release: tuple[str, ...], case: str) -> None:
    ran_through(fla_session(*release)[case], OURS)


@pytest.mark.parametrize("case", ["intermediate states", "intermediate states, V-first"])
def test_intermediate_states(fla_session: Any, release: tuple[str, ...], case: str) -> None:
    found = fla_session(*release)[case]
    assert found["intermediate"] == [[1, 3, 2, 128, 128], "torch.bfloat16"]
    assert max(found["intermediate_errors"]) < LIMIT


@pytest.mark.parametrize("case", DECLINED)
def test_what_is_declined(fla_session: Any, release: tuple[str, ...], case: str) -> None:
    found = fla_session(*release)[case]
    assert f"-> {OURS} rejected: {DECLINED[case]}" in found["log"][0]
    if case == "an unknown option":  # FLA's own backend knows no better
        assert found["log"][1].endswith(f"-> {BUILT_IN[release[0]]}")
    else:
        ran_triton(found)


def test_counts(fla_session: Any, release: tuple[str, ...]) -> None:
    counts = fla_session(*release)["counts"]
    assert counts.pop("served") == len(SERVED)
    assert all(count == 1 for count in counts.values())
    assert len(counts) == len(DECLINED)
    for reason in DECLINED.values():
        assert any(key.startswith(reason) for key in counts)
