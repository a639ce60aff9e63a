"""What a results file says beside the peers' times and the targets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PEERS_FILE = HERE / "peers" / "h200.json"
TARGETS_FILE = HERE / "targets.json"
REGIMES = ("strong", "weak")

Table = Mapping[str, Any]


class Cell(NamedTuple):
    """One of our rows, with what it is held against. Times in microseconds."""

    row: Mapping[str, Any]
    target: float | None
    peers: Mapping[str, float]
    misses: tuple[str, ...]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=lambda name: self.peers[name], default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours."""
        return None if self.best_peer is None else self.peers[self.best_peer] / self.row["median_us"]


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def peer_times(results: Table, peers: Table, seq_lens: str, heads: int, regime: str) -> dict[str, float]:
    """Microseconds of each peer with fp32 states: from these results if it was run along, else from the peers' file."""
    times: dict[str, float] = {}
    for row in peers["rows"]:
        if (row["seq_lens"], row["heads"]) == (seq_lens, heads):
            times |= row[regime]
    for row in results["rows"]:
        if row["path"] in peers["peers"] and _key(row) == (seq_lens, heads, regime, "fp32"):
            times[row["path"]] = row["median_us"]
    return times


def cells(results: Table, peers: Table, targets: Table, path: str) -> list[Cell]:
    """The rows of ``path`` in the file's order, each with all that it misses."""
    rows = [row for row in results["rows"] if row["path"] == path]
    with_fp32 = {_key(row)[:3]: row["median_us"] for row in rows if row["state"] == "fp32"}
    wanted = {(row["seq_lens"], row["heads"], regime): row[regime] for row in targets["rows"] for regime in REGIMES}
    found = []
    for row in rows:
        seq_lens, heads, regime, state = _key(row)
        target, times = None, {}
        if state == "fp32":
            times = peer_times(results, peers, seq_lens, heads, regime)
            if path == targets["path"]:
                target = wanted.get((seq_lens, heads, regime))
        reference = with_fp32.get((seq_lens, heads, regime))
        found.append(Cell(row, target, times, tuple(_misses(row, target, times, reference, targets))))
    return found


def _misses(
    row: Mapping[str, Any], target: float | None, peers: Mapping[str, float], with_fp32: float | None, targets: Table
) -> Iterator[str]:
    median = row["median_us"]
    if target is not None and median > target:
        yield f"target {target:g} us"
    for name, limit in targets["errors"][row["regime"]].items():
        error = row[f"err_{name}"]
        if error is not None and not error <= limit:
            yield f"error of {name} {error:.2e} > {limit:.2e}"
    if row["path"] == targets["path"] and peers and min(peers.values()) < targets["least_ratio"] * median:
        yield f"slower than {min(peers, key=lambda name: peers[name])}"
    portable = targets["portable"]
    if row["path"] == portable["path"] and peers.get(portable["no_slower_than"], math.inf) < median:
        yield f"slower than {portable['no_slower_than']}"
    if row["state"] != "fp32" and with_fp32 is not None and median > targets["other_states"]["ratio"] * with_fp32:
        yield f"slower than with fp32 states ({with_fp32:.1f} us)"


def _key(row: Mapping[str, Any]) -> tuple[str, int, str, str]:
    return row["seq_lens"], row["heads"], row["regime"], row["state"]


def geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def table(results: Table, peers: Table, targets: Table, path: str) -> Iterator[str]:
    """The comparison in lines of text; the last ones sum it up."""
    found = cells(results, peers, targets, path)
    about = results["paths"].get(path, {})
    yield f"{path}: {results['gpu']}, driver {results['driver']}, torch {results['torch']}, {results['date']}"
    if "cubin" in about:
        yield f"machine code: {about['cubin']['unit']} {about['cubin']['arch']}, sha256 {about['cubin']['sha256']}"
    yield ""
    yield (
        f"{'tokens':28}{'heads':>5}  {'gate':8}{'state':6}{'us':>9}{'cold':>9}{'floor':>8}{'x floor':>9}{'target':>8}"
        f"  {'best peer':20}{'ratio':>6}  misses"
    )
    for cell in found:
        row = cell.row
        peer = "" if cell.best_peer is None else f"{cell.best_peer} {cell.peers[cell.best_peer]:.1f}"
        yield (
            f"{_short(row['seq_lens']):28}{row['heads']:>5}  {row['regime']:8}{row['state']:6}"
            f"{row['median_us']:>9.1f}{row['cold_us']:>9.1f}{row['floor_us']:>8.1f}{row['median_us'] / row['floor_us']:>9.2f}"
            f"{'' if cell.target is None else format(cell.target, 'g'):>8}  {peer:20}"
            f"{'' if cell.ratio is None else format(cell.ratio, '.2f'):>6}  {'; '.join(cell.misses)}".rstrip()
        )
    yield ""
    yield from summary(found, targets, path)
    for failure in results["failures"]:
        if failure["path"] == path:
            yield (
                f"FAILED: {_short(failure['seq_lens'])}, {failure['heads']} heads, {failure['regime']}, {failure['state']}: "
                f"{failure['why']}"
            )


def summary(found: list[Cell], targets: Table, path: str) -> Iterator[str]:
    ratios = [cell.ratio for cell in found if cell.ratio is not None]
    if ratios:
        mean = geometric_mean(ratios)
        line = f"best peer's time over ours, {len(ratios)} cells: geometric mean {mean:.2f}, least {min(ratios):.2f}"
        if path == targets["path"] and mean < targets["geometric_mean_ratio"]:
            line += f"  MISSES the mean of {targets['geometric_mean_ratio']:g}"
        yield line
    missing = sum(bool(cell.misses) for cell in found)
    yield f"{missing} of {len(found)} cells miss something"


def misses_anything(results: Table, peers: Table, targets: Table, path: str) -> bool:
    found = cells(results, peers, targets, path)
    ratios = [cell.ratio for cell in found if cell.ratio is not None]
    return (
        any(cell.misses for cell in found)
        or any(failure["path"] == path for failure in results["failures"])
        or (path == targets["path"] and bool(ratios) and geometric_mean(ratios) < targets["geometric_mean_ratio"])
    )


def _short(seq_lens: str) -> str:
    return seq_lens if len(seq_lens) <= 27 else seq_lens[:25] + ".."
