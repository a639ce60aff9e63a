"""The report of a results file: a page in Markdown and its plots. The same data gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import compare, plots
from benchmarks.compare import REGIMES, Cell, Table
from benchmarks.plots import SHORT

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "benchmarks" / "plots"

# Between these lines README.md shows the newest kept results.
README_BEGIN, README_END = "<!-- results: written by python -m benchmarks report -->", "<!-- end of results -->"


def page_of(results_file: Path) -> Path:
    return ROOT / page_name(results_file.stem)


def write(results_file: Path, page: Path, folder: Path) -> list[Path]:
    """Write the page and its plots, for light and dark; returns their paths."""
    results = compare.load(results_file)
    peers, targets = compare.load(compare.PEERS_FILE), compare.load(compare.TARGETS_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw(results, peers, targets)
    written = []
    for name, images in drawn.items():
        for theme, image in images.items():
            target = folder / f"{results_file.stem}-{name}-{theme}.svg"
            target.write_bytes(image)
            written.append(target)
    text = "\n".join(lines(results_file.stem, results, peers, targets))
    page.write_text(text + "\n", encoding="utf-8")
    return [page, *written]


def lines(stem: str, results: Table, peers: Table, targets: Table) -> Iterator[str]:
    ours = [name for name in results["paths"] if name not in peers["peers"]]
    yield f"# Times on one {results['gpu']}"
    yield ""
    yield (
        f"<!-- Written by `python -m benchmarks report` from benchmarks/results/{stem}.json: change that, and write it anew. -->"
    )
    yield ""
    yield f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, {results['date']}."
    for name in ours:
        about = results["paths"][name]
        cubin = about["cubin"]
        yield f"`{name}`: flash_kda {about['version']}, {cubin['unit']} for {cubin['arch']}, sha256 `{cubin['sha256']}`."
    yield ""
    yield results["method"]
    yield ""
    yield "Peers, unless the table says otherwise, were measured on the same kind of GPU on another day:"
    yield ""
    for name, about in peers["peers"].items():
        yield f"- {about['name']}: {about['version']}; {about['note']}{along(results, name)}"
    yield ""
    yield peers["note"]
    yield ""
    first = ours[0] if ours else None
    for name in plots.NAMES:
        yield from picture(stem, name, plots.CAPTIONS[name])
    for path in ours:
        found = compare.cells(results, peers, targets, path)
        yield f"## `{path}`"
        yield ""
        yield from (f"- {line}" for line in compare.summary(found, targets, path))
        yield ""
        yield from with_fp32(found, peers, path == first)
        yield from other_states(found)
        yield from missed(found, results, path)


def newest() -> Path | None:
    """The results file of the latest day."""
    kept = sorted(RESULTS.glob("*.json"))
    return max(kept, key=lambda path: compare.load(path)["date"], default=None)


def readme(text: str, results_file: Path) -> str:
    """README.md with its part that shows results written anew."""
    before, begin, rest = text.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"README.md: expected the lines {README_BEGIN} and {README_END}, and results between them")
    results = compare.load(results_file)
    peers, targets = compare.load(compare.PEERS_FILE), compare.load(compare.TARGETS_FILE)
    block = "\n".join(comparison(results_file.stem, results, peers, targets))
    return f"{before}{begin}\n\n{block}\n{end}{after}"


def comparison(stem: str, results: Table, peers: Table, targets: Table) -> Iterator[str]:
    """A picture and one table: this project's preferred kernel and its peers."""
    path = targets["path"]
    found = compare.cells(results, peers, targets, path)
    about = results["paths"][path]
    yield from picture(stem, "overview", plots.CAPTIONS["overview"])
    yield (
        "| microseconds; strong / weak gate | flash_kda | "
        + " | ".join(p["name"] for p in peers["peers"].values())
        + " |"
    )
    yield "|---|" + "---:|" * (1 + len(peers["peers"]))
    cells = {
        (cell.row["seq_lens"], cell.row["heads"], cell.row["regime"]): cell
        for cell in found
        if cell.row["state"] == "fp32"
    }
    for seq_lens, heads in reversed(plots.OVERVIEW):
        both = [cells.get((seq_lens, heads, regime)) for regime in REGIMES]
        columns = [_pair([cell and cell.row["median_us"] for cell in both], ".0f")]
        columns += [_pair([cell and cell.peers.get(name) for cell in both], ".0f") for name in peers["peers"]]
        yield f"| {seq_lens.replace(',', ', ').replace('x', ' x ')} tokens, {heads} heads | {' | '.join(columns)} |"
    for name, what in (("out", "outputs"), ("state", "states")):
        worst = [
            max((cell.row[f"err_{name}"] for key, cell in cells.items() if key[2] == regime), default=None)
            for regime in REGIMES
        ]
        columns = [_pair(worst, ".1e")]
        columns += [
            _pair([p.get("errors", {}).get(regime, {}).get(name) for regime in REGIMES], ".1e")
            for p in peers["peers"].values()
        ]
        yield f"| error of {what}, relative to fp64 | {' | '.join(columns)} |"
    yield ""
    ratios = [cell.ratio for cell in found if cell.ratio is not None]
    live = sum(row["path"] in peers["peers"] and row["state"] == "fp32" for row in results["rows"])
    days = f", but for {live} cells of this run" if live else ""
    yield (
        f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, {results['date']}; kernel `{path}`, sha256 "
        f"`{about['cubin']['sha256'][:12]}...`. Over {len(ratios)} cells (shapes times gates) the best peer takes "
        f"{compare.geometric_mean(ratios):.2f} times as long as this kernel in the geometric mean, {min(ratios):.2f} times at least; "
        f"errors are the largest of any shape. Peers were measured on the same kind of GPU on another day{days}. Every shape, the portable "
        f"kernel, what misses its target and how it was measured: [{page_name(stem)}]({page_name(stem)})."
    )


def page_name(stem: str) -> str:
    return f"BENCHMARK_{stem.upper()}.md"


def _pair(values: list[float | None], form: str) -> str:
    texts = ["" if value is None else format(value, form) for value in values]
    return texts[0] if texts[0] == texts[1] else " / ".join(text or "-" for text in texts)


def picture(stem: str, name: str, caption: str) -> Iterator[str]:
    source = f"benchmarks/plots/{stem}-{name}"
    yield "<picture>"
    yield f'<source media="(prefers-color-scheme: dark)" srcset="{source}-dark.svg">'
    yield f'<img alt="{caption}" src="{source}-light.svg">'
    yield "</picture>"
    yield ""


def with_fp32(found: list[Cell], peers: Table, targets: bool) -> Iterator[str]:
    """Both regimes of a shape in one row."""
    rows: dict[tuple[str, int], dict[str, Cell]] = {}
    for cell in found:
        if cell.row["state"] == "fp32":
            rows.setdefault((cell.row["seq_lens"], cell.row["heads"]), {})[cell.row["regime"]] = cell
    if not rows:
        return
    names = list(peers["peers"])
    yield "fp32 states in and out; microseconds, weak gate after strong where they are two figures."
    yield "Large shapes are often a little quicker cold, presumably since the sweep also writes back what the last call left modified."
    yield ""
    yield (
        "| tokens | heads | floor | warm | cold | times the floor | target |"
        + "".join(f" {peers['peers'][name]['name']} |" for name in names)
        + " best peer / ours | error out | error state |"
    )
    yield "|---|" + "---:|" * (9 + len(names))
    for (seq_lens, heads), cells in rows.items():
        values = [cells.get(regime) for regime in REGIMES]

        def both(of: Callable[[Cell], float | None], form: str, values: list[Cell | None] = values) -> str:
            return _pair([None if cell is None else of(cell) for cell in values], form)

        yield " | ".join(
            [
                f"| {SHORT.get(seq_lens, seq_lens)}",
                f"{heads}",
                both(lambda cell: cell.row["floor_us"], ".1f"),
                both(lambda cell: cell.row["median_us"], ".1f"),
                both(lambda cell: cell.row["cold_us"], ".1f"),
                both(lambda cell: cell.row["median_us"] / cell.row["floor_us"], ".2f"),
                both(lambda cell: cell.target, "g") if targets else "",
                *(_pair([cell and cell.peers.get(name) for cell in values], ".0f") for name in names),
                both(lambda cell: cell.ratio, ".2f"),
                both(lambda cell: cell.row["err_out"], ".1e"),
                both(lambda cell: cell.row["err_state"], ".1e") + " |",
            ]
        )
    yield ""
    yield "mixed: 1300, 547, 2048, 963, 271 and 3063 tokens. 8x1024: eight sequences of 1024 tokens."
    yield ""


def along(results: Table, peer: str) -> str:
    """Which cells of a peer are of this run, not of the peers' file, and which it did not give."""
    of_peer = {kind: [row for row in results[kind] if row["path"] == peer] for kind in ("rows", "failures")}
    if not any(of_peer.values()):
        return ""
    text = f". In this run, version {results['paths'][peer]['version']}: "
    text += "; ".join(_case(row) for row in of_peer["rows"]) or "nothing"
    if of_peer["failures"]:
        text += ". Not measured in it: " + "; ".join(f"{_case(row)} ({row['why']})" for row in of_peer["failures"])
    return text


def _case(row: Mapping[str, Any]) -> str:
    return f"{SHORT.get(row['seq_lens'], row['seq_lens'])}, {row['heads']} heads, {row['regime']}, {row['state']}"


def other_states(found: list[Cell]) -> Iterator[str]:
    times: dict[tuple[str, int, str], dict[str, float]] = {}
    for cell in found:
        row = cell.row
        times.setdefault((row["seq_lens"], row["heads"], row["regime"]), {})[row["state"]] = row["median_us"]
    several = {key: states for key, states in times.items() if len(states) > 1}
    if not several:
        return
    yield "By the kind of the states, microseconds:"
    yield ""
    yield "| tokens | heads | gate | fp32 | bf16 | none |"
    yield "|---|---:|---|---:|---:|---:|"
    for (seq_lens, heads, regime), states in several.items():
        columns = [f"{states[name]:.1f}" if name in states else "" for name in ("fp32", "bf16", "none")]
        yield f"| {SHORT.get(seq_lens, seq_lens)} | {heads} | {regime} | {' | '.join(columns)} |"
    yield ""


def missed(found: list[Cell], results: Mapping[str, Any], path: str) -> Iterator[str]:
    """What is not as it should be, in words."""
    said = [
        f"- {SHORT.get(cell.row['seq_lens'], cell.row['seq_lens'])}, {cell.row['heads']} heads, {cell.row['regime']}, "
        f"{cell.row['state']}: {cell.row['median_us']:.1f} us; " + "; ".join(cell.misses)
        for cell in found
        if cell.misses
    ]
    said += [
        f"- {failure['seq_lens']}, {failure['heads']} heads, {failure['regime']}, {failure['state']}: not measured: {failure['why']}"
        for failure in results["failures"]
        if failure["path"] == path
    ]
    if said:
        yield "Targets missed:"
        yield ""
        yield from said
        yield ""
