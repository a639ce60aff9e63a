"""The calls that sglang makes, on the CPU path; tests/gpu/test_engines.py makes them on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import engine_calls  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:flash_kda.fwd was called with CPU tensors")


@pytest.mark.parametrize("beta_is_raw", [True, False], ids=["logits", "logits from activated beta"])
def test_the_published_form(beta_is_raw: bool) -> None:
    engine_calls.check_sglang("cpu", beta_is_raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_form_with_a_pool(dtype: torch.dtype) -> None:
    engine_calls.check_sglang_pool("cpu", dtype)
