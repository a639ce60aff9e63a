"""Reads toolchain.lock, and reads, compares and writes device-code.lock."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import ROOT
from tools.errors import BuildError, explain

TOOLCHAIN_LOCK = ROOT / "toolchain.lock"
DEVICE_CODE_LOCK = ROOT / "device-code.lock"


@dataclass(frozen=True)
class Pin:
    """One package of toolchain.lock. `line` is its requirement as pip wants it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        return f"{self.name}=={self.version} " + " ".join(f"--hash=sha256:{h}" for h in self.hashes)

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"


def read_toolchain_lock(path: Path = TOOLCHAIN_LOCK) -> dict[str, Pin]:
    """Packages by name. Raises BuildError for a line that is not `name==version --hash=sha256:...`."""
    with explain(f"cannot read {path.name}"):
        text = path.read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    pins: dict[str, Pin] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        requirement, *options = line.split()
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._!+-]+)", requirement)
        hashes = [re.fullmatch(r"--hash=sha256:([0-9a-f]{64})", option) for option in options]
        if not match or not hashes or not all(hashes):
            raise BuildError(f"{path.name}: expected 'name==version --hash=sha256:...', found '{line.strip()[:80]}'")
        pins[match[1]] = Pin(match[1], match[2], tuple(h[1] for h in hashes if h))
    return pins


def toolchain_digest(path: Path = TOOLCHAIN_LOCK) -> str:
    """sha256 over the packages and hashes of toolchain.lock (comments and layout do not count)."""
    pins = read_toolchain_lock(path)
    return hashlib.sha256("\n".join(pins[name].line for name in sorted(pins)).encode()).hexdigest()


def read_device_code_lock(path: Path = DEVICE_CODE_LOCK) -> dict[str, dict[str, Any]]:
    """Locked cubins as {"unit/arch": record}; empty where there is no lock yet."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {f"{c['unit']}/{c['arch']}": c for c in content["cubins"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{path.name} cannot be read ({error}); renew it with: python3 -m tools lock") from error


def compare_with_lock(built: list[dict[str, Any]], path: Path = DEVICE_CODE_LOCK) -> list[str]:
    """What differs between cubins just built and device-code.lock, one text per difference; empty if all agree."""
    locked = read_device_code_lock(path)
    differences = []
    for cubin in built:
        key = f"{cubin['unit']}/{cubin['arch']}"
        wanted = locked.get(key)
        if wanted is None:
            differences.append(f"{key}: not in the lock")
        elif wanted != cubin:
            before, after = _flat(wanted), _flat(cubin)
            changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
            differences.append(
                f"{key}: " + ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in changed)
            )
    return differences


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"functions": {"f": {"registers": 1}}} as {"f registers": 1}, and digests cut to what a person compares."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat.update(_flat(value, "" if name == "functions" else f"{prefix}{name} "))
        else:
            flat[prefix + name] = value[:12] if name == "sha256" else value
    return flat


def write_device_code_lock(built: list[dict[str, Any]], path: Path = DEVICE_CODE_LOCK) -> None:
    """Write the lock: the same cubins always give the same bytes."""
    with explain(f"cannot write {path.name}"):
        path.write_text(json.dumps({"cubins": built}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
