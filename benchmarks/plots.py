"""Plots of a results file as SVG, each for light and for dark pages, the same bytes for the same data."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import compare
from benchmarks.compare import REGIMES, Table

matplotlib.use("agg")

CAPTIONS = {
    "overview": "Times of this project's kernel and of its peers, shorter is better",
    "floor": "Time of each kernel against the floor that memory sets, both gate regimes",
    "speedup": "How many times as long each peer takes, both gate regimes",
    "scaling": "Time against tokens, heads and sequences, beside the floor",
    "errors": "Relative error of outputs and states against fp64",
}
NAMES = tuple(CAPTIONS)

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d0d7de", "floor": "#57606a"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "floor": "#9198a1"},
}
# Told apart by everybody, on white and on black; shapes of markers repeat what colours say.
COLOURS = {"strong": "#2f81f7", "weak": "#e8710a"}
MARKERS = {"strong": "o", "weak": "D"}
PORTABLE = {"strong": "#7aa7e8", "weak": "#d9a679"}
SHORT = {"1300,547,2048,963,271,3063": "mixed"}


# Of the first picture, from the bottom: single long sequences, then what batches look like.
OVERVIEW = (
    ("65536", 8), ("8192", 16), ("8192", 64), ("8x1024", 96), ("1300,547,2048,963,271,3063", 96), ("8192", 96),
)  # fmt: skip


def draw(results: Table, peers: Table, targets: Table) -> dict[str, dict[str, bytes]]:
    """name -> theme -> SVG."""
    drawers: dict[str, Callable[..., Figure]] = {
        "overview": overview, "floor": against_floor, "speedup": speedup, "scaling": scaling, "errors": errors,
    }  # fmt: skip
    return {
        name: {theme: _svg(drawers[name], results, peers, targets, colours) for theme, colours in THEMES.items()}
        for name in NAMES
    }


def _svg(drawer: Callable[..., Figure], results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> bytes:
    style = {
        "svg.hashsalt": "flash_kda",  # ids would else be random
        "svg.fonttype": "path",  # looks the same whatever fonts the reader has
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 9,
        "axes.edgecolor": theme["grid"],
        "axes.labelcolor": theme["text"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme["grid"],
        "grid.linewidth": 0.6,
        "text.color": theme["text"],
        "xtick.color": theme["text"],
        "ytick.color": theme["text"],
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
        figure = drawer(results, peers, targets, theme)
        figure.supxlabel(_footer(results, peers), fontsize=7, color=theme["floor"])
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # matplotlib ends lines with blanks in places.
    return b"\n".join(line.rstrip() for line in buffer.getvalue().split(b"\n"))


def _footer(results: Table, peers: Table) -> str:
    parts = [results["gpu"], f"driver {results['driver']}", f"torch {results['torch']}", results["date"]]
    for name in _ours(results, peers):
        about = results["paths"][name]
        parts.append(f"{name} {about['version']} sha256 {about['cubin']['sha256'][:12]}")
    return ", ".join(parts)


def _ours(results: Table, peers: Table) -> list[str]:
    return [name for name in results["paths"] if name not in peers["peers"]]


def _times(results: Table, path: str, field: str = "median_us") -> dict[tuple[str, int, str], float]:
    return {
        (row["seq_lens"], row["heads"], row["regime"]): row[field]
        for row in results["rows"]
        if row["path"] == path and row["state"] == "fp32"
    }


def _peer_shapes(results: Table, peers: Table) -> list[tuple[str, int]]:
    """The shapes that peers were measured on and we too, quickest floor at the bottom of a plot."""
    measured = {(row["seq_lens"], row["heads"]): row["floor_us"] for row in results["rows"] if row["state"] == "fp32"}
    shapes = [(row["seq_lens"], row["heads"]) for row in peers["rows"]]
    return sorted((shape for shape in shapes if shape in measured), key=lambda shape: (measured[shape], shape))


def _label(shape: tuple[str, int]) -> str:
    return f"{SHORT.get(shape[0], shape[0])}, H={shape[1]}"


def _shape_axis(axes: Any, shapes: list[tuple[str, int]], what: str) -> None:
    axes.set_yticks(range(len(shapes)), [_label(shape) for shape in shapes])
    axes.set_ylim(-0.7, len(shapes) - 0.3)
    axes.set_xlabel(what)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.tick_params(length=0)


def _plain_ticks(axis: Any, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """Plain numbers on a logarithmic axis, however short."""
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _with_legend(figure: Figure, columns: int) -> Figure:
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside upper center", ncols=columns)
    return figure


def overview(results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> Figure:
    shapes = [shape for shape in OVERVIEW if shape in _peer_shapes(results, peers)]
    path = targets["path"]
    times, floors = _times(results, path), _times(results, path, "floor_us")
    kernels = {path: f"flash_kda, {path}"} | {name: about["name"] for name, about in peers["peers"].items()}
    colours = dict(zip(kernels, (COLOURS["strong"], "#8c959f", "#bf8700", "#a475f9")))
    figure = Figure(figsize=(9, 1.4 + 0.55 * max(len(shapes), 2)))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    height = 0.8 / len(kernels)
    for axes, regime in zip(panels, REGIMES):
        _shape_axis(axes, shapes, f"microseconds, {regime} gate")
        _plain_ticks(axes.xaxis, (1,))  # it spans several powers of ten
        axes.grid(axis="y", visible=False)
        for i, name in enumerate(kernels):
            bars = []
            for y, shape in enumerate(shapes):
                found = compare.peer_times(results, peers, *shape, regime)
                if (*shape, regime) in times:
                    found[path] = times[(*shape, regime)]
                if name in found:
                    bars.append((y + (1.5 - i) * height, found[name]))
            if bars:
                places, lengths = zip(*bars)
                label = kernels[name] if axes is panels[0] else None
                axes.barh(places, lengths, height * 0.9, color=colours[name], label=label)
                for place, length in bars:
                    axes.text(length * 1.05, place, f"{length:.0f}", va="center", fontsize=6.5)
        for y, shape in enumerate(shapes):
            if (*shape, regime) in floors:
                label = "floor set by memory" if axes is panels[0] and y == 0 else None
                axes.vlines(
                    floors[(*shape, regime)],
                    y - 0.42,
                    y + 0.42,
                    color=theme["text"],
                    linewidth=1,
                    linestyle=":",
                    label=label,
                )
        axes.margins(x=0.12)
    return _with_legend(figure, 5)


def against_floor(results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> Figure:
    shapes = _peer_shapes(results, peers)
    figure = Figure(figsize=(8, 1.6 + 0.23 * max(len(shapes), 4)))
    axes = figure.add_subplot()
    _shape_axis(axes, shapes, "times the floor: inputs, outputs and states moved once")
    axes.axvline(1, color=theme["floor"], linewidth=1.2)
    for path, colours, size in zip(_ours(results, peers), (COLOURS, PORTABLE), (22, 12)):
        times, floors = _times(results, path), _times(results, path, "floor_us")
        for regime in REGIMES:
            points = [
                (times[(*shape, regime)] / floors[(*shape, regime)], y)
                for y, shape in enumerate(shapes)
                if (*shape, regime) in times
            ]
            if points:
                axes.scatter(
                    *zip(*points), s=size, marker=MARKERS[regime], color=colours[regime], label=f"{path}, {regime} gate"
                )
    _best_peers(axes, shapes, results, peers, theme)
    return _with_legend(figure, 3)


def _best_peers(axes: Any, shapes: list[tuple[str, int]], results: Table, peers: Table, theme: dict[str, str]) -> None:
    floors = {(row["seq_lens"], row["heads"]): row["floor_us"] for row in results["rows"] if row["state"] == "fp32"}
    for regime in REGIMES:
        points = []
        for y, shape in enumerate(shapes):
            times = compare.peer_times(results, peers, *shape, regime)
            if times:
                points.append((min(times.values()) / floors[shape], y))
        if points:
            axes.scatter(
                *zip(*points), s=16, marker=MARKERS[regime], facecolors="none", edgecolors=theme["floor"], linewidths=0.8,
                label=f"best peer, {regime} gate",
            )  # fmt: skip


def speedup(results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> Figure:
    shapes, names = _peer_shapes(results, peers), list(peers["peers"])
    path = targets["path"]
    times = _times(results, path)
    figure = Figure(figsize=(9, 1.6 + 0.21 * max(len(shapes), 4)))
    panels = figure.subplots(1, len(names), sharex=True, sharey=True)
    for axes, name in zip(panels, names):
        _shape_axis(axes, shapes, f"{peers['peers'][name]['name']}: its time over ours")
        axes.axvline(1, color=theme["floor"], linewidth=1.2)
        for regime in REGIMES:
            points = []
            for y, shape in enumerate(shapes):
                peer = compare.peer_times(results, peers, *shape, regime).get(name)
                if peer is not None and (*shape, regime) in times:
                    points.append((peer / times[(*shape, regime)], y))
            if points:
                label = f"{path}, {regime} gate" if name == names[0] else None
                axes.scatter(*zip(*points), s=20, marker=MARKERS[regime], color=COLOURS[regime], label=label)
    return _with_legend(figure, 2)


def scaling(results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> Figure:
    from benchmarks.__main__ import SCALING

    path = targets["path"]
    times, floors = _times(results, path), _times(results, path, "floor_us")
    places: dict[str, Callable[[tuple[str, int]], int]] = {
        "tokens": lambda shape: int(shape[0]),
        "heads": lambda shape: shape[1],
        "sequences": lambda shape: int(shape[0].split("x")[0]) if "x" in shape[0] else 1,
    }
    fixed = {"tokens": "one sequence, 16 heads", "heads": "8192 tokens", "sequences": "of 1024 tokens, 16 heads"}
    figure = Figure(figsize=(9, 3.4))
    panels = figure.subplots(1, len(SCALING))
    for axes, (name, series) in zip(panels, SCALING.items()):
        place = places[name]
        for regime in REGIMES:
            points = [(place(shape), times[(*shape, regime)]) for shape in series if (*shape, regime) in times]
            if points:
                axes.plot(
                    *zip(*points), marker=MARKERS[regime], markersize=4, color=COLOURS[regime], linewidth=1.2,
                    label=f"{path}, {regime} gate" if axes is panels[0] else None,
                )  # fmt: skip
        points = [(place(shape), floors[(*shape, "strong")]) for shape in series if (*shape, "strong") in floors]
        if points:
            axes.plot(
                *zip(*points), color=theme["floor"], linewidth=1.2, linestyle="--",
                label="floor" if axes is panels[0] else None,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _plain_ticks(axes.yaxis)
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_xlabel(f"{name} ({fixed[name]})")
    panels[0].set_ylabel("microseconds")
    return _with_legend(figure, 3)


def errors(results: Table, peers: Table, targets: Table, theme: dict[str, str]) -> Figure:
    shapes = _peer_shapes(results, peers)
    path = targets["path"]
    figure = Figure(figsize=(9, 1.6 + 0.21 * max(len(shapes), 4)))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (field, name) in zip(panels, (("err_out", "out"), ("err_state", "state"))):
        _shape_axis(axes, shapes, f"relative error of {'outputs' if name == 'out' else 'final states'}")
        axes.set_xscale("linear")  # which brings its own ticks
        values = _times(results, path, field)
        for regime in REGIMES:
            points = [(values[(*shape, regime)], y) for y, shape in enumerate(shapes) if (*shape, regime) in values]
            if points:
                label = f"{path}, {regime} gate" if name == "out" else None
                axes.scatter(*zip(*points), s=20, marker=MARKERS[regime], color=COLOURS[regime], label=label)
            limit = targets["errors"][regime][name]
            axes.axvline(
                limit, color=COLOURS[regime], linewidth=1, linestyle="--",
                label=f"limit, {regime} gate" if name == "out" else None,
            )  # fmt: skip
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g}e-3" if value else "0")
    return _with_legend(figure, 4)
