"""The bodies of the GPU tests on the CPU path: the same checks, in small sizes, so that they are known to work (and to fail)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kda_cases as cases  # noqa: E402
import record  # noqa: E402
from kda_cases import BF16, EMPTY_LENGTHS, FP32, LIMIT, REGIME, STRONG, WEAK, WEAKEST  # noqa: E402

import flash_kda  # noqa: E402

GATES = pytest.mark.parametrize("gate", [STRONG, WEAK, WEAKEST], ids=REGIME.get)


@GATES
@pytest.mark.parametrize("final", [None, BF16, FP32], ids=["no final", "final bf16", "final fp32"])
@pytest.mark.parametrize("initial", [None, BF16, FP32], ids=["no initial", "initial bf16", "initial fp32"])
def test_accuracy(gate: float, initial: torch.dtype | None, final: torch.dtype | None) -> None:
    for lengths in ([33, 7, 64], EMPTY_LENGTHS):
        problem = cases.make("cpu", lengths, 2, gate, initial=initial, slack=3)
        cases.check_against_oracle("", problem, LIMIT[gate], final, kind="recurrent")


@GATES
def test_batches(gate: float) -> None:
    cases.check_against_oracle("", cases.make("cpu", None, 2, gate, batch=(3, 50), initial=FP32), LIMIT[gate])


def test_equal_keys() -> None:
    cases.check_against_oracle("", cases.equal_keys("cpu", 512, 1), cases.EQUAL_KEYS_LIMIT)


@pytest.mark.parametrize("name", sorted(cases.extremes("cpu")))
def test_extreme_inputs_stay_finite(name: str) -> None:
    cases.run(cases.extremes("cpu")[name])


def test_heads_do_not_mix() -> None:
    problem = cases.make("cpu", [40, 9], 4, WEAK, initial=FP32)
    out, state = cases.oracle(problem)
    part_out, part_state = cases.oracle(problem.heads([0, 3]))
    assert cases.distance(part_out, out[:, :, [0, 3]]) < 1e-14
    assert cases.distance(part_state, state[:, [0, 3]]) < 1e-14


def test_layout_bodies() -> None:
    cases.check_fused_slices("cpu", 20, 3)
    cases.check_fused_slices("cpu", 20, 3, spare=12, shift=1)
    cases.check_mixed_layouts("cpu")
    cases.check_layouts("cpu")
    cases.check_empty_calls("cpu")
    cases.check_state_in_place("cpu")
    cases.check_odd_offsets("cpu")
    cases.check_offset_dtypes("cpu")
    cases.check_split_call("cpu", 100, [1, 18, 64])
    cases.check_key_first_states("cpu")
    cases.check_pools("cpu")
    cases.check_all_saved_states("cpu")
    cases.check_workspace("cpu")


@pytest.mark.parametrize("name", cases.forms("cpu", [20, 5]))
def test_forms(name: str) -> None:
    cases.check_against_oracle("", cases.forms("cpu", [20, 5])[name], cases.FORM_LIMIT, kind="recurrent")


@pytest.mark.parametrize("seed", range(8))
def test_random_forms(seed: int) -> None:
    cases.check_against_oracle("", cases.random_form("cpu", seed), cases.FORM_LIMIT, kind="recurrent")


def test_fresh_process() -> None:
    body = """
        thread = threading.Thread(target=first_call)
        thread.start()
        thread.join()
    """
    assert cases.fresh_process("cpu", body) == "right\n"
    with pytest.raises(AssertionError):
        cases.fresh_process("cpu", "first_call(); out.add_(1)")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        cases.fresh_process("cpu", "1 / 0")


# Each way in which a kernel could be wrong, played by a broken fwd: the checks must see it.


def broken(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    right = flash_kda.fwd

    def fwd(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        spoil(*result)
        return result

    monkeypatch.setattr(flash_kda, "fwd", fwd)


def write_before(out: torch.Tensor, state: torch.Tensor) -> None:
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()


def write_behind_state(out: torch.Tensor, state: torch.Tensor) -> None:
    torch.as_strided(state, (1,), (1,), state.storage_offset() + state.numel()).zero_()


SPOILED = {
    "out is off by 2 %": lambda out, state: out.mul_(1.02),
    "state is off by 2 %": lambda out, state: state.mul_(1.02),
    "a value is missing": lambda out, state: out[0, 5].fill_(float("nan")),
    "a state is missing": lambda out, state: state[1].fill_(float("nan")),
    "infinite": lambda out, state: state[0, 0, 0].fill_(float("inf")),
    "written before out": write_before,
    "written behind the state": write_behind_state,
    "a row of no sequence is written": lambda out, state: out[0, -1].zero_(),
}


@pytest.mark.parametrize("how", SPOILED)
def test_checks_see_a_wrong_kernel(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.make("cpu", [20, 13], 2, WEAK, initial=FP32, slack=2)
    cases.check_against_oracle("", problem, LIMIT[WEAK])
    broken(monkeypatch, SPOILED[how])
    with pytest.raises(AssertionError):
        cases.check_against_oracle("", problem, LIMIT[WEAK])


def test_record(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda.device_code import Cubin

    monkeypatch.setattr(record, "cubins", {Cubin("portable", "90a", "ab" * 32, 1000)})
    monkeypatch.setattr(record, "kernels", {"portable-wide"})
    monkeypatch.setattr(record, "errors", {})
    monkeypatch.setattr(record, "times_us", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(record, "driver_version", lambda: "580.1")
    record.error("a case", out=0.00512345, state=0.004)
    record.time("a shape", 1234.56)
    with pytest.raises(AssertionError, match="two cases"):
        record.error("a case", out=0.0)
    target = record.write(str(tmp_path / "new" / "h200.json"), passed=3, failed=0, skipped=1)
    content = json.loads(target.read_text())
    assert content["cubins"] == [{"unit": "portable", "arch": "90a", "sha256": "ab" * 32}]
    assert content["kernels"] == ["portable-wide"]
    assert content["tests"] == {"passed": 3, "failed": 0, "skipped": 1}
    assert content["errors"] == {"a case": {"out": 5.123e-3, "state": 4e-3}}
    assert content["times_us"] == {"a shape": 1234.6}
    assert {"gpu", "driver", "torch", "date"} <= content.keys()
    other = {
        "cubins": content["cubins"],
        "kernels": ["sm90"],
        "errors": {"a case": {"out": 1e-3}},
        "times_us": {"a case": 5.0},
    }
    monkeypatch.setattr(record.device_code, "embedded", lambda: [Cubin("portable", "90a", "ab" * 32, 1000)])
    record.merge(other, "sm90:")
    assert record.kernels == {"portable-wide", "sm90"}
    assert record.errors["sm90: a case"] == {"out": 1e-3}
    assert record.times_us["sm90: a case"] == 5.0
    assert record.path("h200") == record.RECORDS / "h200.json"
    assert record.path("somewhere/x.json").parts == ("somewhere", "x.json")


def test_problem_fields_are_all_moved() -> None:
    """heads() must not forget a field that has a head dimension."""
    names = {field.name for field in dataclasses.fields(cases.Problem)}
    assert names == {
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "scale", "lower_bound",
        "options",
    }  # fmt: skip
