"""What the installation says about its machine code, and the doctor's verdicts."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_native  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import __main__ as command_line  # noqa: E402
from flash_kda import device_code, doctor  # noqa: E402

H200 = ("NVIDIA H200", 9, 0)
A100 = ("NVIDIA A100", 8, 0)
SPARK = ("NVIDIA GB10", 12, 1)


def use(monkeypatch: pytest.MonkeyPatch, **options: Any) -> fake_native.FakeNative:
    module = fake_native.FakeNative(**options)
    monkeypatch.setattr(device_code, "_module", module)
    return module


def no_module() -> Any:
    raise RuntimeError("flash_kda's compiled module is missing")


# ---- architectures


@pytest.mark.parametrize(
    ("arch", "capabilities"),
    [
        ("90a", [(9, 0)]),
        ("100a", [(10, 0)]),
        ("103a", [(10, 3)]),
        ("120a", [(12, 0)]),
        ("120f", [(12, 0), (12, 1)]),
        ("103f", [(10, 3)]),
    ],
)
def test_what_code_runs_on(arch: str, capabilities: list[tuple[int, int]]) -> None:
    every = [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert [c for c in every if device_code.runs(arch, *c)] == capabilities
    major, minor = capabilities[0]
    assert device_code.serves(arch).startswith(f"{major}.{minor}")
    assert ("later" in device_code.serves(arch)) == arch.endswith("f")


# ---- device_code


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, gpus=(H200, A100))
    assert device_code.choose(0).kernel == "sm90-wide"
    assert device_code.choose(0).cubin == device_code.Cubin("sm90", "90a", "1" * 64, 40000)
    assert flash_kda.is_available()
    kernel, cubin, reason = device_code.choose(1)
    assert kernel is cubin is None
    assert "A100" in reason
    assert not flash_kda.is_available(1)
    assert device_code.choose(2) == (None, None, "no device 2: the driver shows 2")
    assert [(gpu.name, gpu.capability) for gpu in device_code.gpus()] == [
        ("NVIDIA H200", "9.0"),
        ("NVIDIA A100", "8.0"),
    ]
    assert device_code.build_record()["version"] == "0.1.0"


def test_choice_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, driver=False)
    assert device_code.choose().reason == "no CUDA driver: libcuda.so.1: cannot open shared object file"
    assert device_code.gpus() == []


def test_choice_without_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "native", no_module)
    assert device_code.choose() == (None, None, "flash_kda's compiled module is missing")


def test_a_forced_kernel_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    monkeypatch.setenv("FLASH_KDA_KERNEL", "sm90-wide")
    assert device_code.choose().reason == "FLASH_KDA_KERNEL=sm90-wide asks for it"
    monkeypatch.setenv("FLASH_KDA_KERNEL", "auto")
    assert device_code.choose().reason == "the best that fits this device"


# ---- doctor


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = command_line.main(arguments)
    return code, capsys.readouterr().out


def with_cuda_torch(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    monkeypatch.setattr(doctor, "_torch", lambda: {"version": "2.11.0", "cuda": "CUDA 13.0", "reason": ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_compare", error if callable(error) else lambda device: error)


def test_doctor_good(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, gpus=(H200, A100))
    with_cuda_torch(monkeypatch, 4e-3)
    code, text = run(capsys, "doctor")
    assert code == doctor.GOOD == 0
    assert "GOOD: 1 GPU(s) ready, 1 without a kernel" in text
    assert f"uses sm90-wide, the best that fits this device (sm90 90a, sha256 {'1' * 64})" in text
    assert "not portable 90a: would run, but sm90-wide was chosen: the best that fits this device" in text
    assert "not portable 120f: runs on compute capability 12.0 and later 12.x, and this is 9.0" in text
    assert "kernel on cuda:0 against the fp64 recurrence: relative error 4.0e-03, good" in text
    assert "cuda:1" not in text
    assert "CUDA 13.0" in text


def test_doctor_family_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = use(monkeypatch, gpus=(SPARK,))
    monkeypatch.setattr(
        module, "select", lambda index: {**module.CUBINS[2], "kernel": "portable-narrow"}, raising=False
    )
    with_cuda_torch(monkeypatch, 4e-3)
    code, text = run(capsys, "doctor")
    assert code == 0
    assert "uses portable-narrow" in text
    assert "(portable 120f, " in text


@pytest.mark.parametrize("error", [2e-2, float("nan"), float("inf")])
def test_doctor_wrong_results(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    with_cuda_torch(monkeypatch, error)
    code, text = run(capsys, "doctor")
    assert code == doctor.BROKEN == 1
    assert "BROKEN: self-check failed" in text


def test_doctor_failing_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(device: str) -> float:
        raise RuntimeError("launching the kernel: out of memory")

    use(monkeypatch)
    with_cuda_torch(monkeypatch, fails)
    code, text = run(capsys, "doctor")
    assert code == 1
    assert "FAILED: RuntimeError: launching the kernel: out of memory" in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"driver": False}, "no GPU is visible"),
        ({"gpus": ()}, "no GPU is visible"),
        ({"gpus": (A100,)}, "no code for NVIDIA A100"),
    ],
    ids=["no driver", "no GPU", "unsupported GPU"],
)
def test_doctor_reference_only(
    options: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, **options)
    code, text = run(capsys, "doctor")
    assert code == doctor.REFERENCE_ONLY == 3
    assert "CPU REFERENCE ONLY" in text
    assert reason in text
    assert "chunked reference against the fp64 recurrence: relative error" in text


def test_doctor_names_the_kernel_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, driver=False)
    assert "FLASH_KDA_KERNEL" not in run(capsys, "doctor")[1]
    monkeypatch.setenv("FLASH_KDA_KERNEL", "portable-wide")
    assert "FLASH_KDA_KERNEL=portable-wide is set" in run(capsys, "doctor")[1]


def test_doctor_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    monkeypatch.setattr(doctor, "_torch", lambda: {"version": "2.11.0+cpu", "cuda": None, "reason": ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = run(capsys, "doctor")
    assert code == 3
    assert "this torch is built without CUDA" in text


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    monkeypatch.setattr(doctor, "_torch", lambda: {"version": None, "cuda": None, "reason": "ModuleNotFoundError"})
    code, text = run(capsys, "doctor")
    assert code == doctor.NO_TORCH == 4
    assert "skipped: torch is not installed" in text
    assert "INCOMPLETE" in text


def test_doctor_without_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_code, "native", no_module)
    code, text = run(capsys, "doctor")
    assert code == 1
    assert "BROKEN: flash_kda's compiled module is missing" in text


def test_doctor_without_machine_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, cubins=(), gpus=())
    code, text = run(capsys, "doctor")
    assert code == 1
    assert "carries no machine code" in text


def test_doctor_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, driver=False)
    code, text = run(capsys, "doctor", "--json")
    report = json.loads(text)
    assert code == report["exit_code"] == 3
    assert [cubin["sha256"] for cubin in report["cubins"]] == ["1" * 64, "2" * 64, "3" * 64]
    assert report["self_check"][0]["passed"] is True
    assert report["driver"]["loaded"] is False


def test_the_self_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda import reference

    right = reference.chunked
    assert doctor._compare("cpu") < 1e-5

    def wrong(*arguments: Any, **named: Any) -> Any:
        out, state = right(*arguments, **named)
        return out, state * 1.05

    monkeypatch.setattr(reference, "chunked", wrong)
    assert doctor._compare("cpu") == pytest.approx(0.05, rel=1e-2)


def test_archs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    code, text = run(capsys, "archs")
    assert code == 0
    for cubin in fake_native.FakeNative.CUBINS:
        assert cubin["sha256"] in text
    code, text = run(capsys, "archs", "--json")
    assert code == 0
    assert json.loads(text)["build"]["version"] == "0.1.0"
    monkeypatch.setattr(device_code, "native", no_module)
    assert command_line.main(["archs"]) == 1
    assert "compiled module is missing" in capsys.readouterr().err


def test_a_wrong_command_line_is_no_verdict() -> None:
    for arguments in ([], ["verify"], ["doctor", "--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            command_line.main(arguments)
        assert caught.value.code == 2


# ---- the compiled module itself, where it is there


def test_the_real_module() -> None:
    try:
        module = device_code.native()
    except RuntimeError as error:
        pytest.skip(f"not built: {error}")
    cubins = device_code.embedded()
    assert cubins
    assert all(len(cubin.sha256) == 64 and cubin.size > 0 for cubin in cubins)
    assert {cubin["sha256"] for cubin in device_code.build_record()["cubins"]} == {cubin.sha256 for cubin in cubins}
    driver = module.driver()
    assert set(driver) == {"loaded", "version", "reason"}
    assert len(device_code.gpus()) == module.device_count()
    kernel, cubin, reason = device_code.choose(module.device_count())  # one too many
    assert kernel is cubin is None
    assert reason
    with pytest.raises(RuntimeError):
        module.select(module.device_count())
