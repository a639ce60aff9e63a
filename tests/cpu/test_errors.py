"""docs/errors.md: each message there is raised by some call, and each refusal of a call is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import fake_native  # noqa: E402
from test_checks import REFUSED, arguments  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import device_code  # noqa: E402

# Of torch itself, where it first looks for rules of derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| [^|]+ \| `([^|]+)` \| [^|]*\|$", PAGE, re.MULTILINE)

# What only the compiled module says: found in its sources instead.
NATIVE = [message for message in MESSAGES if message.startswith("flash_kda: ")]
RAISED_HERE = [message for message in MESSAGES if message not in NATIVE]


def pattern(message: str) -> re.Pattern[str]:
    """The whole message, or its beginning: hints that depend on the call are left out in the table."""
    parts = re.split(r"(…|NAME)", message)
    meaning = {"…": ".*?", "NAME": r"\w+"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


def test_the_page_is_a_table_of_messages() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| refused")]
    assert len(rows) == len(MESSAGES) == len(set(MESSAGES))
    assert len(NATIVE) == 5


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return str(caught.value)


def without_module(monkeypatch: pytest.MonkeyPatch, error: ImportError, found: list[Path]) -> str:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "flash_kda._native":
                raise error

    monkeypatch.setattr(device_code, "_module", None)
    monkeypatch.delitem(sys.modules, "flash_kda._native", raising=False)
    monkeypatch.delattr(flash_kda, "_native", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.setattr(Path, "glob", lambda *_: found)
    return str(flash_kda.is_available().reason)


def without_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "flash_kda.forward")
    monkeypatch.delitem(flash_kda.__dict__, "fwd", raising=False)
    monkeypatch.delitem(flash_kda.__dict__, "forward", raising=False)
    for module in ("flash_kda.ops", "flash_kda.checks", "flash_kda.reference"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return said(lambda: flash_kda.__getattr__("fwd"))


def with_fake_fla(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> str:
    """An FLA of 0.6 that has only what ``register`` looks at first."""
    fla, backends, kda = (ModuleType(name) for name in ("fla", "fla.backends", "fla.ops.kda"))

    class BaseBackend:
        pass

    BaseBackend.__module__ = "fla.backends"
    backends.__dict__.update(BaseBackend=BaseBackend, register=lambda entry: None, _DISPATCH_DISABLED=disabled)
    kda.chunk_kda = lambda q: q  # type: ignore[attr-defined]
    for module in (fla, backends, ModuleType("fla.ops"), kda):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flash_kda.fla, "_registered", False)
    return said(flash_kda.fla.register)


def without_fla(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "fla", None)
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(flash_kda.fla, "_registered", False)
    return said(flash_kda.fla.register)


def with_fake_driver(monkeypatch: pytest.MonkeyPatch, device: int, **options: Any) -> str:
    monkeypatch.setattr(device_code, "_module", fake_native.FakeNative(**options))
    return str(flash_kda.is_available(device).reason)


def tangent() -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        v = arguments()["v"]
        flash_kda.fwd(**arguments(v=forward_ad.make_dual(v, v)))


def vmapped() -> Any:
    call = arguments(initial_state=None, final_state=None, out=None)
    v = call.pop("v")
    torch.func.vmap(lambda v: flash_kda.fwd(v=v, **call)[0])(v.unsqueeze(0))


def seventeenth() -> Any:
    flash_kda.vllm.register()
    c = arguments()
    torch.ops._flashkda_C.fwd(
        c["q"], c["k"], c["v"], c["g"], c["beta"], 0.1, c["out"], None, None, None, -5.0, None, None, None, None, None, c["cu_seqlens"]
    )  # fmt: skip


def freed() -> Any:
    call = arguments()
    call["q"].untyped_storage().resize_(0)
    flash_kda.fwd(**call)


def vllm_loaded_its_own(monkeypatch: pytest.MonkeyPatch) -> str:
    flash_kda.vllm.register()  # so that the operator is there
    monkeypatch.setattr(flash_kda.vllm, "_library", None)
    return said(flash_kda.vllm.register)


# Refusals that are not those of test_checks.
OTHERS: dict[str, Callable[[pytest.MonkeyPatch], str]] = {
    "a tensor without memory": lambda patch: said(freed),
    "a tangent": lambda patch: said(tangent),
    "vmap": lambda patch: said(vmapped),
    "an unknown option": lambda patch: said(lambda: flash_kda.fwd(**arguments(), transpose=True)),
    "contrary switches": lambda patch: said(lambda: flash_kda.fwd(**arguments(batch_invariant=True, enable_cp=True))),
    "a small workspace": lambda patch: said(
        lambda: flash_kda.forward.check_workspace(torch.empty(1, dtype=torch.uint8), 2)
    ),
    "a negative count": lambda patch: said(lambda: flash_kda.get_workspace_size(-1, 1)),
    "no torch": without_torch,
    "no module": lambda patch: without_module(patch, ModuleNotFoundError("No module named 'flash_kda._native'"), []),
    "another Python": lambda patch: without_module(
        patch, ModuleNotFoundError("No module named 'flash_kda._native'"), [Path("_native.cpython-38.so")]
    ),
    "a broken module": lambda patch: without_module(patch, ImportError("undefined symbol"), []),
    "no driver": lambda patch: with_fake_driver(patch, 0, driver=False),
    "no such GPU": lambda patch: with_fake_driver(patch, 3),
    "no FLA": without_fla,
    "FLA's backends are off": lambda patch: with_fake_fla(patch, disabled=True),
    "declined": lambda patch: said(lambda: flash_kda.fla.chunk_kda(*(arguments()[n] for n in "qkvg"), None)),
    "too late for vLLM": vllm_loaded_its_own,
    "checkpoint_indptr": lambda patch: said(seventeenth),
}


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """What every known refusal says."""
    found = {}
    for name, (change, _, _) in REFUSED.items():
        found[name] = said(lambda change=change: flash_kda.fwd(**arguments(**change())))
    for name, raises in OTHERS.items():
        with pytest.MonkeyPatch.context() as patch:
            found[name] = raises(patch)
    return found


@pytest.mark.parametrize("message", RAISED_HERE)
def test_a_message_is_what_is_raised(messages: dict[str, str], message: str) -> None:
    assert [name for name, text in messages.items() if pattern(message).match(text)]


@pytest.mark.parametrize("name", [*REFUSED, *OTHERS])
def test_a_refusal_is_in_the_table(messages: dict[str, str], name: str) -> None:
    rows = [message for message in RAISED_HERE if pattern(message).match(messages[name])]
    # "[…], got […]" is any shape; where another row says more, it does not count.
    assert len(rows) == 1 or len([row for row in rows if row != "NAME: expected […], got […]"]) == 1, (
        messages[name],
        rows,
    )


@pytest.mark.parametrize("message", NATIVE)
def test_a_message_of_the_compiled_module_is_in_its_sources(message: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "csrc" / "host").glob("*.cpp")))
    sources = re.sub(r'"\s*\n?\s*"', "", sources)  # literals that go on in the next line
    for part in message.removeprefix("flash_kda: ").split("…"):
        text = part.strip(" ()")
        assert text in sources, text
