"""PTX to cubin with ptxas, and what ptxas says about registers, spills and shared memory."""

import re
from pathlib import Path

from tools import settings
from tools.errors import BuildError, explain
from tools.process import capture, last_error

_FUNCTION = re.compile(r"(?:Compiling entry function '([^']+)'|Function properties for (\S+))")
# Figures by function.
Resources = dict[str, dict[str, int]]
FIGURES = ("registers", "stack", "spill_stores", "spill_loads", "shared")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> Resources:
    """Figures per function from `ptxas -v`: registers per thread; stack, spills, static shared memory in bytes.

    A device function that was not inlined has an entry of its own (registers 0: it uses its caller's).
    """
    entries: Resources = {}
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


def assemble(ptxas: Path, ptx: Path, cubin: Path, arch: str, options: tuple[str, ...]) -> tuple[Resources, list[str]]:
    """Write `cubin`; returns (resources per entry point, warnings). Raises BuildError with ptxas' own words."""
    loader = settings.text(settings.LOADER)
    command = [
        *([loader] if loader else []),
        str(ptxas),
        f"-arch=sm_{arch}",
        "-O3",
        "-v",
        *options,
        ptx.name,
        "-o",
        cubin.name,
    ]
    with explain(f"cannot run {ptxas.name}"):
        result = capture(command, cwd=ptx.parent)
    log = result.stdout + result.stderr
    if result.returncode != 0:
        raise BuildError(f"ptxas failed for sm_{arch} with status {result.returncode}: {last_error(log)}")
    return parse_resources(log), parse_warnings(log)


def spilling(resources: Resources, allowed: frozenset[str]) -> list[str]:
    """Entry points that spill registers although they are not in `allowed`, with the bytes."""
    return [
        f"{name} ({figures['spill_stores']} bytes stored, {figures['spill_loads']} loaded)"
        for name, figures in sorted(resources.items())
        if name not in allowed and (figures["spill_stores"] or figures["spill_loads"])
    ]
