"""The harness without a GPU: its checks on real results, its bookkeeping with workers that answer, fail, hang and die."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from benchmarks import __main__ as command  # noqa: E402
from benchmarks import compare, runner, worker  # noqa: E402
from benchmarks.paths import DEFAULT, OURS, PATHS, PEERS  # noqa: E402
from flash_kda import bench, reference  # noqa: E402

CASE = {"seq_lens": "40,0,2x17", "heads": 3, "regime": "weak", "state": "fp32", "floor_bandwidth": 4.3e12}


class FakeTimer:
    def median_us(self, call: Any, cold: bool = False) -> float:
        call()
        return 30.0 if cold else 20.0


SHAPE = bench.Shape((40, 0, 17, 17), 3)


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
@pytest.mark.parametrize("regime", ["strong", "weak"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "none"])
def test_a_right_result_is_timed(state: str, regime: str) -> None:
    inputs = bench.make(SHAPE, regime, state, "cpu")
    row = bench.measure(bench.our_call(inputs), SHAPE, state, inputs, FakeTimer(), 4.3e12)
    assert (row["median_us"], row["cold_us"]) == (20.0, 30.0)
    assert 5e-4 < row["err_out"] < 5e-3  # of rounding to bf16
    assert (row["err_state"] is None) == (state == "none")
    if state == "bf16":
        assert 5e-5 < row["err_state"] < 5e-3  # the empty sequence's state, the largest, is exact


def spoil_out(out: Any, state: Any) -> None:
    out[:, :, 2] *= 1.05


def spoil_state(out: Any, state: Any) -> None:
    state[3] += state[0]


def spoil_one_value(out: Any, state: Any) -> None:
    out[0, 0, 1, 0] = float("nan")  # in a head that is not compared


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
@pytest.mark.parametrize("spoil", [spoil_out, spoil_state, spoil_one_value])
def test_a_wrong_result_is_not_timed(spoil: Any) -> None:
    shape = SHAPE._replace(heads=9 if spoil is spoil_one_value else 3)
    inputs = bench.make(shape, "weak", "fp32", "cpu")

    def call() -> Any:
        out, state = flash_kda.fwd(**inputs)
        spoil(out, state)
        return out, state

    with pytest.raises(bench.WrongResult, match="relative error of out "):
        bench.measure(call, shape, "fp32", inputs, None, 4.3e12)  # type: ignore[arg-type]


def test_inputs_are_of_their_regime() -> None:
    for regime, mean in (("strong", 0.0), ("weak", -7.0)):
        inputs = bench.make(bench.Shape((300,), 4), regime, "bf16", "cpu")
        assert abs(float(inputs["g"].float().mean()) - mean) < 0.02
        assert abs(float(inputs["g"].float().std()) - 1) < 0.02
        assert inputs["initial_state"].dtype is torch.bfloat16
        assert inputs["cu_seqlens"] is None
    offsets = bench.make(bench.Shape((3, 0, 4), 1), "weak", "none", "cpu")["cu_seqlens"]
    assert offsets.tolist() == [0, 3, 3, 7]


def test_lengths_in_words() -> None:
    assert bench.parse_lengths("8191, 2 x 1,7") == (8191, 1, 1, 7)
    assert bench.Shape((8191, 1, 1, 7), 1).seq_lens == "8191,2x1,7"
    for wrong in ("", "8192:96", "x3", "-1", "1,,2", "[8192]"):
        with pytest.raises(ValueError, match="expected lengths"):
            bench.parse_lengths(wrong)


def test_the_floor_moves_each_byte_once() -> None:
    inputs = bench.make(bench.Shape((50, 14), 3), "weak", "fp32", "cpu")
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta", "out", "initial_state", "final_state")]
    assert bench.moved_bytes(bench.Shape((50, 14), 3), "fp32") == sum(t.numel() * t.itemsize for t in tensors)
    assert bench.floor_us(bench.Shape((8192,), 96), "fp32", 4.3e12) == pytest.approx(237.4, abs=0.05)


def test_peers_are_called_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the peers' parameters that compute with the oracle: what they are handed must mean the same problem."""
    import types

    def chunk_kda(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False, lower_bound=None,
        state_v_first=False, cu_seqlens=None, *, A_log, dt_bias,
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel
        assert use_gate_in_kernel
        assert use_beta_sigmoid_in_kernel
        assert safe_gate
        assert state_v_first
        out, state = reference.chunked(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
        return out.bfloat16(), state.float() if output_final_state else None

    def kimi_delta_attention(
        q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False, gate_lower_bound=None,
        a_log=None, dt_bias=None, plan_name=None,
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel
        assert use_beta_sigmoid_in_kernel
        assert safe_gate
        assert g.dtype is beta.dtype is torch.float32
        rows = (x.unsqueeze(0) for x in (q, k, v, g, beta))
        out, state = reference.chunked(*rows, scale, a_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens)
        return out[0].bfloat16(), state if output_final_state else torch.empty(0)

    modules = {
        "fla": {}, "fla.ops": {}, "fla.ops.kda": {"chunk_kda": chunk_kda},
        "cudnn": {}, "cudnn.linear_attention": {}, "cudnn.linear_attention.ops": {"kimi_delta_attention": kimi_delta_attention},
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for peer in PEERS:
        for state in ("fp32", "none"):
            for lengths in ("33", "20,0,9"):
                shape = bench.Shape(bench.parse_lengths(lengths), 3)
                inputs = bench.make(shape, "weak", state, "cpu")
                row = bench.measure(PATHS[peer].prepare(inputs), shape, state, inputs, FakeTimer(), 4.3e12)
                assert row["err_out"] < 5e-3
                assert (row["err_state"] is None) == (state == "none")


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
def test_a_worker_answers_case_by_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def make(shape: bench.Shape, regime: str, state: str) -> Any:
        made.append(shape.seq_lens)
        return bench.make(shape, regime, state, "cpu")

    def prepare(inputs: Any) -> Any:
        if inputs["q"].shape[2] == 2:
            raise NotImplementedError("no even\nheads")
        return PATHS["sm90"].prepare(inputs)

    monkeypatch.setattr(worker, "make", make)
    monkeypatch.setattr(worker, "Timer", FakeTimer)
    monkeypatch.setattr(worker, "about", lambda version, is_peer: {"version": version})
    monkeypatch.setattr(worker, "PATHS", {"sm90": PATHS["sm90"]._replace(prepare=prepare, version=lambda: "9")})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cases = [CASE, {**CASE, "seq_lens": "16", "heads": 2}, {**CASE, "seq_lens": "17"}]
    monkeypatch.setattr(sys, "stdin", [json.dumps(case) for case in cases])
    worker.main("sm90")
    answers = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines() if line.startswith("@")]
    assert answers[0] == {"about": {"version": "9"}}
    assert answers[2] == {"failure": "NotImplementedError: no even heads"}
    assert answers[1]["row"]["floor_us"] == round(bench.floor_us(bench.Shape((40, 0, 17, 17), 3), "fp32", 4.3e12), 2)
    assert answers[3]["row"]["median_us"] == 20.0
    assert made == ["40,0,2x17", "16", "17"]


# A worker that does as the number of heads says.
FAKE_WORKER = """
import json, os, sys, time
print("a peer greets")
print("@" + json.dumps({"about": {"gpu": "G", "driver": "1.2", "torch": "2.9", "version": sys.argv[1],
    "kernel": os.environ.get("FLASH_KDA_KERNEL")}}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case["heads"] == 13: sys.exit("illegal memory access")
    if case["heads"] == 14: time.sleep(60)
    if case["heads"] == 15: answer = {"failure": "wrong: all of it"}
    else: answer = {"row": {"median_us": 1.0 * case["heads"], "cold_us": 9.0, "floor_us": 0.5, "err_out": 4e-3, "err_state": 3e-3}}
    print("chatter"); print("@" + json.dumps(answer), flush=True)
"""


def fake_run(target: Path, heads: list[int], paths: tuple[str, ...] = ("sm90", "fla"), earlier: Any = None) -> Any:
    cases = [{"seq_lens": "8192", "heads": h, "regime": "weak", "state": "fp32"} for h in heads]
    results = runner.Results(target, 4.3e12, earlier)
    said: list[str] = []
    fake = (sys.executable, "-c", FAKE_WORKER)
    fine = [runner.run(path, cases, results, said.append, fake, case_seconds=3) for path in paths]
    return all(fine), json.loads(target.read_text()), said


def test_a_run_is_kept(tmp_path: Path) -> None:
    fine, content, said = fake_run(tmp_path / "new" / "x.json", [1, 2])
    assert fine
    assert len(said) == 4
    assert [(row["path"], row["heads"], row["median_us"]) for row in content["rows"]] == [
        ("sm90", 1, 1.0), ("sm90", 2, 2.0), ("fla", 1, 1.0), ("fla", 2, 2.0),
    ]  # fmt: skip
    assert (content["gpu"], content["driver"], content["torch"]) == ("G", "1.2", "2.9")
    assert content["paths"]["sm90"] == {"version": "sm90", "kernel": "sm90"}  # in its environment
    assert content["failures"] == []
    assert {"seq_lens", "heads", "regime", "state", "path", "median_us", "floor_us", "err_out", "err_state"} <= content[
        "rows"
    ][0].keys()


def test_what_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    fine, content, said = fake_run(tmp_path / "x.json", [1, 13, 14, 15, 2], ("sm90",))
    assert not fine
    assert [row["heads"] for row in content["rows"]] == [1, 2]
    assert [failure["why"] for failure in content["failures"]] == [
        "the process ended: illegal memory access", "no answer in 3 s", "wrong: all of it",
    ]  # fmt: skip
    assert "FAILED: the process ended" in said[1]


def test_what_a_limit_leaves_out_is_said(tmp_path: Path) -> None:
    _, first, _ = fake_run(tmp_path / "x.json", [2], ("fla",))
    cases = [{"seq_lens": "8192", "heads": h, "regime": "weak", "state": "fp32"} for h in (1, 14, 2, 3)]
    results = runner.Results(tmp_path / "x.json", 4.3e12, first)
    said: list[str] = []
    assert not runner.run("fla", cases, results, said.append, (sys.executable, "-c", FAKE_WORKER), limit=2)
    content = json.loads((tmp_path / "x.json").read_text())
    assert [row["heads"] for row in content["rows"]] == [2, 1]  # 2: measured before, of the same code
    failures = [(failure["heads"], failure["why"]) for failure in content["failures"]]
    assert failures[1:] == [(3, "not run: the 2 s for this path were over")]
    assert failures[0][0] == 14
    assert "no answer in" in failures[0][1]
    assert said[-1] == "fla: 2 s are over, 2 cases not run"


def test_a_path_that_cannot_run_is_said(tmp_path: Path) -> None:
    results = runner.Results(tmp_path / "x.json", 4.3e12)
    said: list[str] = []
    worker = (sys.executable, "-c", "import sys; sys.exit('no such GPU')")
    assert not runner.run("sm90", [CASE], results, said.append, worker)
    assert said == ["sm90: cannot run: the process ended: no such GPU"]


def test_adding_keeps_the_rest(tmp_path: Path) -> None:
    _, first, _ = fake_run(tmp_path / "x.json", [1, 2, 15])
    first["rows"][0]["median_us"] = 777.0
    _, second, _ = fake_run(tmp_path / "x.json", [2, 3], ("sm90",), first)
    assert [(row["path"], row["heads"]) for row in second["rows"]] == [
        ("sm90", 1), ("fla", 1), ("fla", 2), ("sm90", 2), ("sm90", 3),
    ]  # fmt: skip
    assert second["rows"][0]["median_us"] == 777.0
    assert len(second["failures"]) == 2
    # Rows of other machine code are of no use beside the new ones.
    first["paths"]["sm90"]["version"] = "older"
    _, third, _ = fake_run(tmp_path / "x.json", [3], ("sm90",), first)
    assert [(row["path"], row["heads"]) for row in third["rows"]] == [("fla", 1), ("fla", 2), ("sm90", 3)]
    first["gpu"] = "another"
    with pytest.raises(ValueError, match="of gpu another, and this is G"):
        fake_run(tmp_path / "x.json", [3], ("sm90",), first)


def test_cases_are_the_peers_shapes_and_the_scaling_ones() -> None:
    cases = list(command.cases(None, None, scaling=False))
    shapes = {(case["seq_lens"], case["heads"]) for case in cases}
    assert len(shapes) == 29
    assert len([case for case in cases if case["state"] == "fp32"]) == 58
    assert {case["state"] for case in cases} == {"fp32", "bf16", "none"}
    assert shapes >= set(command.OTHER_STATES)
    more = list(command.cases(None, None))
    assert more[: len(cases)] == cases
    assert len({tuple(case.items()) for case in more}) == len(more)
    shapes = {(case["seq_lens"], case["heads"]) for case in more}
    assert shapes >= {shape for series in command.SCALING.values() for shape in series}
    assert all(bench.Shape(bench.parse_lengths(seq_lens), heads).seq_lens == seq_lens for seq_lens, heads in shapes)
    assert list(command.cases(["2 x 8:4"], ["none"])) == [
        {"seq_lens": "2x8", "heads": 4, "regime": regime, "state": "none"} for regime in ("strong", "weak")
    ]
    with pytest.raises(SystemExit, match="expected LENGTHS:HEADS"):
        list(command.cases(["8192"], None))


def test_without_a_gpu_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["run", "--out", str(tmp_path / "x.json"), "--shapes", "16:1"]) == 1
    said = capsys.readouterr()
    assert "sm90: cannot run: " in said.out
    assert "nothing was measured" in said.err
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(SystemExit, match="--add keeps"):
        command.main(["run", "--out", str(tmp_path / "x.json")])


def test_names() -> None:
    assert set(DEFAULT) <= set(OURS)
    assert set(PEERS) <= set(compare.load(compare.PEERS_FILE)["peers"])
