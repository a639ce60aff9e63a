"""Running other programs."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

Result = subprocess.CompletedProcess[str]


def capture(command: Sequence[str], cwd: Optional[Path] = None, env: Optional[Mapping[str, str]] = None) -> Result:
    """Run a program to its end, whatever its status, with its output kept as text."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)


def last_error(output: str) -> str:
    """The line of a program's output that says most: its first error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|ERROR|fatal|No space left)\b", line)]
    return (errors[:1] or lines[-1:] or ["it said nothing"])[0]
