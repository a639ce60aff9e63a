"""GPU tests: marked, skipped with a reason where no GPU can run them, and recorded if asked."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    major, minor = torch.cuda.get_device_capability(0)
    if major < 9:
        return f"{torch.cuda.get_device_name(0)} has compute capability {major}.{minor}; the kernels start at 9.0"
    # A GPU that we support but that gets no kernel is a failure, not a reason to skip.
    return None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record", None):
        reason = why_no_gpu()
        if reason is not None:
            raise pytest.UsageError(f"--record: nothing to record: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason: str | None = None
    asked = False
    for item in items:
        if HERE not in item.path.parents:
            continue
        if not asked:
            reason, asked = why_no_gpu(), True
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"GPU test: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    name = config.getoption("record", None)
    if not name:
        return
    import record

    count = {
        outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")
    }
    target = record.write(name, count["passed"], count["failed"] + count["error"], count["skipped"])
    terminalreporter.write_line(f"record: {target}")
