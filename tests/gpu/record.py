"""What a GPU test run leaves behind: a JSON record that ties results to the machine code that gave them.

Tests call ``used_kernel``, ``error`` and ``time`` as they go; conftest.py calls ``write`` at the end of a run with ``--record``.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch

from flash_kda import device_code
from flash_kda.bench import driver_version

RECORDS = Path(__file__).resolve().parent / "records"

cubins: set[device_code.Cubin] = set()  # what was exercised, not what is embedded
kernels: set[str] = set()  # entry points of these
errors: dict[str, dict[str, float]] = {}
times_us: dict[str, float] = {}


_asked: set[int] = set()


def used_kernel(device: int) -> None:
    """Note the machine code that a call on this GPU runs."""
    if device in _asked:
        return
    _asked.add(device)
    kernel, cubin, reason = device_code.choose(device)
    assert kernel is not None, reason
    assert cubin is not None, reason
    kernels.add(kernel)
    cubins.add(cubin)


def merge(other: dict[str, Any], prefix: str) -> None:
    """Add the record of a run in another process; its cases get a prefix."""
    for entry in other["cubins"]:
        cubins.update(c for c in device_code.embedded() if c.sha256 == entry["sha256"] and c.unit == entry["unit"])
    kernels.update(other["kernels"])
    errors.update({f"{prefix} {case}": values for case, values in other["errors"].items()})
    times_us.update({f"{prefix} {case}": value for case, value in other["times_us"].items()})


def error(case: str, **values: float) -> None:
    assert case not in errors, f"two cases are called {case!r}"
    errors[case] = {name: float(f"{value:.3e}") for name, value in values.items()}


def time(case: str, microseconds: float) -> None:
    assert case not in times_us, f"two cases are called {case!r}"
    times_us[case] = round(microseconds, 1)


def path(name: str) -> Path:
    target = Path(name)
    if target.parent == Path(".") and not name.startswith("."):
        return RECORDS / (name if target.suffix == ".json" else f"{name}.json")
    return target


def content(passed: int, failed: int, skipped: int) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cubins": [{"unit": c.unit, "arch": c.arch, "sha256": c.sha256} for c in sorted(cubins)],
        "kernels": sorted(kernels),
        "tests": {"passed": passed, "failed": failed, "skipped": skipped},
        "errors": errors,
        "times_us": times_us,
    }


def write(name: str, passed: int, failed: int, skipped: int) -> Path:
    target = path(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content(passed, failed, skipped), indent=1, sort_keys=False) + "\n")
    return target
