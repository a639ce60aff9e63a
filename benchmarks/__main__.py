"""python -m benchmarks: time every kernel on one GPU, and compare with others' kernels and with the targets.

From the root of the source tree, with flash_kda built in place (`python3 -m tools module --archs 90a`) and torch:

    python -m benchmarks run --out benchmarks/results/h200.json            # our kernels, all shapes; two minutes on an H200
    python -m benchmarks run --out benchmarks/results/h200.json --add --paths --peers fla --shapes 8192:96 8192:64
    python -m benchmarks table benchmarks/results/h200.json                # ratios, and what misses its target
    python -m benchmarks report                                            # BENCHMARK_H200.md and its plots, with matplotlib
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import compare, runner
from benchmarks.paths import DEFAULT, OURS, PATHS, PEERS

H200_BANDWIDTH = 4.3e12  # bytes a second, read and written, of a copy on an H200
# The peers' shapes are all run with fp32 states; these with the other kinds as well.
OTHER_STATES = (
    ("8192", 96), ("1300,547,2048,963,271,3063", 64), ("8x1024", 64), ("8192", 16), ("2048", 12), ("256x16", 32),
)  # fmt: skip
# One dimension at a time, for the first path alone.
SCALING = {
    "tokens": [(str(1024 << i), 16) for i in range(8)],
    "heads": [("8192", H) for H in (4, 8, 16, 24, 32, 48, 64, 96)],
    "sequences": [("1024" if N == 1 else f"{N}x1024", 16) for N in (1, 2, 4, 8, 16, 32, 64)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return int(options.function(options))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="run | table | report")

    run = commands.add_parser("run", help="check and time; writes a results file")
    run.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="results file, written anew after each case"
    )
    run.add_argument("--add", action="store_true", help="keep what FILE already holds, unless it is measured again")
    run.add_argument(
        "--paths", nargs="*", default=list(DEFAULT), choices=OURS, metavar="PATH",
        help=f"which of our kernels, of {', '.join(OURS)} (default: {' '.join(DEFAULT)}; none if none is named)",
    )  # fmt: skip
    run.add_argument(
        "--peers", nargs="*", default=[], choices=PEERS, metavar="PEER",
        help="also time these, if they can be imported: " + ", ".join(f"{name} ({PATHS[name].needs})" for name in PEERS),
    )  # fmt: skip
    run.add_argument(
        "--shapes", nargs="+", metavar="LENGTHS:HEADS", help="only these, as 8192:96 or 8191,64x1:16 (default: all of the peers' file)"
    )  # fmt: skip
    run.add_argument("--states", nargs="+", choices=("fp32", "bf16", "none"), help="only these")
    run.add_argument(
        "--bandwidth", type=float, default=H200_BANDWIDTH, metavar="BYTES", help="bytes a second, for the floor (default: an H200's)"
    )  # fmt: skip
    run.add_argument(
        "--limit", type=float, metavar="SECONDS",
        help="for all cases of a path together (default: 90 for each case); a peer that compiles many variants may need it",
    )  # fmt: skip
    run.set_defaults(function=command_run)

    table = commands.add_parser("table", help="print a results file beside the peers and the targets")
    table.add_argument("file", type=Path)
    table.add_argument("--paths", nargs="+", metavar="PATH", help="only these (default: all of ours in the file)")
    table.add_argument("--check", action="store_true", help="exit with 1 if anything misses its target")
    table.set_defaults(function=command_table)

    report = commands.add_parser(
        "report",
        help="write BENCHMARK_NAME.md and its plots from benchmarks/results/NAME.json, and README.md's table from the newest",
    )
    report.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results files (default: all)")
    report.set_defaults(function=command_report)
    return top


def cases(shapes: list[str] | None, states: list[str] | None, scaling: bool = True) -> Iterator[runner.Case]:
    """What is run, the shapes that kernels are usually compared on first, and those of the scaling plots last."""
    known = [(row["seq_lens"], row["heads"]) for row in compare.load(compare.PEERS_FILE)["rows"]]
    wanted = known if shapes is None else [_shape(text) for text in shapes]
    chosen = [(shape, "fp32") for shape in wanted]
    for state in ("bf16", "none"):
        chosen += [(shape, state) for shape in wanted if states is not None or shape in OTHER_STATES]
    if shapes is None and scaling:
        chosen += [(shape, "fp32") for series in SCALING.values() for shape in series if shape not in known]
    for (seq_lens, heads), state in dict.fromkeys(chosen):
        if states is None or state in states:
            for regime in compare.REGIMES:
                yield {"seq_lens": seq_lens, "heads": heads, "regime": regime, "state": state}


def _shape(text: str) -> tuple[str, int]:
    from flash_kda.bench import parse_shape

    try:
        shape = parse_shape(text)
    except ValueError as error:
        raise SystemExit(f"--shapes: {error}") from None
    return shape.seq_lens, shape.heads


def command_run(options: argparse.Namespace) -> int:
    earlier: dict[str, Any] | None = None
    if options.out.exists():
        if not options.add:
            raise SystemExit(f"{options.out} exists: --add keeps what it holds; or name another file")
        earlier = compare.load(options.out)
    results = runner.Results(options.out, options.bandwidth, earlier)
    paths = list(dict.fromkeys([*options.paths, *options.peers]))
    fine = True
    for i, path in enumerate(paths):
        todo = cases(options.shapes, options.states, scaling=i == 0)
        fine &= runner.run(path, todo, results, lambda text: print(text, flush=True), limit=options.limit)
    if not results.content["rows"]:
        print("nothing was measured", file=sys.stderr)
        return 1
    print(f"wrote {options.out}: python -m benchmarks table {options.out}")
    return 0 if fine else 1


def command_table(options: argparse.Namespace) -> int:
    results = compare.load(options.file)
    peers, targets = compare.load(compare.PEERS_FILE), compare.load(compare.TARGETS_FILE)
    missed = False
    for path in options.paths or [name for name in results["paths"] if name not in PEERS]:
        print("\n".join(compare.table(results, peers, targets, path)), end="\n\n")
        missed |= compare.misses_anything(results, peers, targets, path)
    return 1 if options.check and missed else 0


def command_report(options: argparse.Namespace) -> int:
    from benchmarks import report  # needs matplotlib

    for file in options.files or sorted(report.RESULTS.glob("*.json")):
        for written in report.write(file, report.page_of(file), report.PLOTS):
            print(written.relative_to(report.ROOT))
    if (newest := report.newest()) is not None:
        page = report.ROOT / "README.md"
        page.write_text(report.readme(page.read_text(encoding="utf-8"), newest), encoding="utf-8")
        print(page.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
