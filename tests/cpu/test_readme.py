"""What README and the pages of docs/ promise in code and numbers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda import doctor, reference  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")
def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code.replace("torch.cuda.is_available()", "False"), "README.md", "exec"), names)
    cu_seqlens, A_log, dt_bias = names["cu_seqlens"], names["A_log"], names["dt_bias"]
    rows = (names[n] for n in ("q", "k", "v", "g", "beta"))
    expected_out, expected_state = reference.recurrent(
        *rows, 128**-0.5, A_log, dt_bias, -5.0, torch.zeros(3, 4, 128, 128), cu_seqlens
    )
    assert torch.allclose(names["out"].double(), expected_out, rtol=1e-2, atol=1e-3)
    assert torch.allclose(names["state"].double(), expected_state, rtol=1e-4, atol=1e-5)


def test_the_signature_is_the_documented_one() -> None:
    page = (ROOT / "docs" / "inputs.md").read_text()
    documented = re.search(r"^flash_kda\.fwd\((.*?)\)$", page, re.DOTALL | re.MULTILINE)
    assert documented is not None
    parameters = inspect.signature(flash_kda.fwd).parameters.values()
    actual = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    keyword_only = next(i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY)
    actual.insert(keyword_only, "*")
    assert [part.strip() for part in documented.group(1).split(",")] == actual
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [p.name for p in parameters]


def test_the_exit_codes_are_the_documented_ones() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| (\d) \|", page, re.MULTILINE) == [
        str(code) for code in (doctor.GOOD, doctor.BROKEN, doctor.REFERENCE_ONLY, doctor.NO_TORCH)
    ]


def test_the_error_bounds_are_the_tested_ones() -> None:
    import kda_cases as cases

    page = (ROOT / "docs" / "accuracy.md").read_text()
    bounds = [float(x) for x in re.findall(r"\| (\de-\d) \|", page)]
    assert bounds == [cases.LIMIT[cases.STRONG], cases.LIMIT[cases.WEAK], cases.EQUAL_KEYS_LIMIT]
    assert cases.LIMIT[cases.WEAKEST] == cases.LIMIT[cases.WEAK]
