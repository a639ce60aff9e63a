"""The build of flash_kda: plain modules on the standard library alone, used by setup.py and by `python3 -m tools`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
