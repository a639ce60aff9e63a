"""PTX to cubin with ptxas, and what ptxas says about registers, spills and shared memory."""

import re
import subprocess
from pathlib import Path

from tools.errors import BuildError, explain

_FUNCTION = re.compile(r"(?:Compiling entry function '([^']+)'|Function properties for (\S+))")
FIGURES = ("registers", "stack", "spill_stores", "spill_loads", "shared")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> dict[str, dict[str, int]]:
    """Figures per function from `ptxas -v`: registers per thread; stack, spills, static shared memory in bytes.

    A device function that was not inlined has an entry of its own (registers 0: it uses its caller's).
    """
    entries: dict[str, dict[str, int]] = {}
    entry = current = None
    for line in log.splitlines():
        function = _FUNCTION.search(line)
        if function:
            name = function[1] or function[2]
            current = entries.setdefault(name, dict.fromkeys(FIGURES, 0))
            if function[1]:
                entry = current
            continue
        if current is None or entry is None:
            continue
        properties, registers, shared = _PROPERTIES.search(line), _REGISTERS.search(line), _SHARED.search(line)
        if properties:
            current["stack"], current["spill_stores"], current["spill_loads"] = map(int, properties.groups())
        if registers:
            entry["registers"] = int(registers[1])
            entry["shared"] = int(shared[1]) if shared else 0
    return entries


def parse_warnings(log: str) -> list[str]:
    """Lines of a `ptxas -v` log that a person must see: warnings, and notes with a number (serialised wgmma and the like)."""
    return [line.strip() for line in log.splitlines() if re.search(r"\bwarning\b|\(C\d{4}\)", line)]


def assemble(ptxas: Path, ptx: Path, cubin: Path, arch: str, options: tuple[str, ...] = ()) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Write `cubin`; returns (resources per entry point, warnings). Raises BuildError with ptxas' own words."""
    command = [str(ptxas), f"-arch=sm_{arch}", "-O3", "-v", *options, ptx.name, "-o", cubin.name]
    with explain(f"cannot run {ptxas.name}"):
        result = subprocess.run(command, cwd=ptx.parent, capture_output=True, text=True, errors="replace", check=False)
    log = result.stdout + result.stderr
    if result.returncode != 0:
        raise BuildError(f"ptxas failed for sm_{arch} with status {result.returncode}: {last_error(log)}")
    return parse_resources(log), parse_warnings(log)


def last_error(log: str) -> str:
    """The line of a compiler's output that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wanted = [line for line in lines if re.search(r"\b(error|fatal|No space left)\b", line)]
    return (wanted or lines or ["it said nothing"])[0 if wanted else -1]


def spilling(resources: dict[str, dict[str, int]], allowed: frozenset[str]) -> list[str]:
    """Entry points that spill registers although they are not in `allowed`, with the bytes."""
    return [
        f"{name} ({figures['spill_stores']} bytes stored, {figures['spill_loads']} loaded)"
        for name, figures in sorted(resources.items())
        if name not in allowed and (figures["spill_stores"] or figures["spill_loads"])
    ]
