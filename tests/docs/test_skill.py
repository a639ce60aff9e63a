"""The agent skill has the usual form, and the errors that it names are raised. Its code blocks are run with the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
SKILL = ROOT / "skills" / "flash-kda" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")


def test_front_matter() -> None:
    _, head, body = TEXT.split("---\n", 2)
    fields = dict(re.findall(r"^(\w+): (.+)$", head, re.MULTILINE))
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", fields["name"])
    assert 100 < len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 500


@pytest.fixture
def call() -> dict[str, object]:
    rows = {name: torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16) for name in ("q", "k", "v", "g")}
    beta = torch.zeros(1, 4, 2, dtype=torch.bfloat16)
    return {**rows, "beta": beta, "scale": 1.0, "out": None, "A_log": None, "dt_bias": None, "lower_bound": -5.0}


def test_named_errors_are_raised(call: dict[str, object]) -> None:
    assert "requires a gradient" in TEXT
    with pytest.raises(RuntimeError, match="requires a gradient"):
        flash_kda.fwd(**{**call, "q": call["q"].clone().requires_grad_()})  # type: ignore[attr-defined]
    assert "An option with another name raises" in TEXT
    with pytest.raises(TypeError):
        flash_kda.fwd(**call, allow_negative_eigval=True)
    with pytest.raises(ValueError, match=r"\[B, T, H, 128\]"):
        flash_kda.fwd(**{**call, "q": torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)})


def test_the_layout_in_other_order_is_refused() -> None:
    heads_first = {name: torch.zeros(1, 2, 4, 128, dtype=torch.bfloat16) for name in ("q", "k", "v", "g")}
    beta = torch.zeros(1, 4, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="T"):
        flash_kda.fwd(**heads_first, beta=beta, scale=1.0, out=None, A_log=None, dt_bias=None, lower_bound=-5.0)
