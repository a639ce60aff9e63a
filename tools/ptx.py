"""Cleans the PTX that NVRTC writes."""

import re
from collections import Counter

# `-default-device` makes a .global of every constexpr variable that a header defines: thousands of symbols, most of a
# megabyte and tens of milliseconds of module load time, none of them used.
_GLOBAL = re.compile(
    r"^(?:\.visible\s+|\.weak\s+|\.common\s+)?\.(?:global|const)\s[^;={(]*?([A-Za-z_$%][\w$]*)\s*(?:\[[^\]]*\]\s*)*(?:=[^;]*)?;[ \t]*\n",
    re.MULTILINE,
)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")


def strip_unused_globals(ptx: str, keep: frozenset[str] = frozenset()) -> str:
    """Drop each module-scope variable whose name occurs nowhere else, except those in `keep`.

    Repeats until nothing changes, since a dropped variable may have held the last use of another. Everything else stays
    byte for byte, so ptxas makes the same instructions of it.
    """
    while True:
        uses = Counter(_NAME.findall(ptx))
        unused = {name for name, count in uses.items() if count == 1} - keep
        stripped = _GLOBAL.sub(lambda match: "" if match[1] in unused else match[0], ptx)  # noqa: B023, used at once
        if stripped == ptx:
            return ptx
        ptx = stripped
