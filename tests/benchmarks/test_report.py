"""The report of results: says all of them, is the same every time, and the kept one is that of the kept results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib, and the pinned one Python 3.11")
pytest.importorskip("torch")

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import compare, plots, report, runner  # noqa: E402
from flash_kda.bench import Shape, floor_us, parse_lengths  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = sorted(report.RESULTS.glob("*.json"))
PINNED = re.search(r"^matplotlib==(\S+?);", (ROOT / "tools" / "test-requirements.txt").read_text(), re.MULTILINE)


def made_up(target: Path, shapes: int | None = None) -> dict[str, Any]:
    """Results as of a run, with times that no GPU gave."""
    results = runner.Results(target, 4.3e12)
    for place, path in enumerate(("sm90", "portable-wide", "fla")):
        about: dict[str, Any] = {"gpu": "NVIDIA GPU", "driver": "580.1", "torch": "2.11", "version": f"0.{place}"}
        if path != "fla":
            about["cubin"] = {"unit": path, "arch": "90a", "sha256": f"{place + 1}" * 64}
        results.begin(path, about)
        for i, case in enumerate(list(command.cases(None, None, scaling=place == 0))[:shapes]):
            floor = floor_us(Shape(parse_lengths(case["seq_lens"]), case["heads"]), case["state"], 4.3e12)
            row = {
                "median_us": round((2 + 0.1 * (i % 7) + place) * floor + 10, 2), "cold_us": round(4 * floor + 10, 2),
                "floor_us": round(floor, 2), "err_out": 4.1e-3, "err_state": None if case["state"] == "none" else 3.1e-3,
            }  # fmt: skip
            results.add({**case, "path": path}, {"row": row})
    results.add(
        {"seq_lens": "7", "heads": 3, "regime": "weak", "state": "fp32", "path": "sm90"}, {"failure": "too slow"}
    )
    results.add(
        {"seq_lens": "9", "heads": 3, "regime": "weak", "state": "fp32", "path": "fla"},
        {"failure": "not run: too late"},
    )
    results.write()
    return results.content


def test_the_page_says_everything(tmp_path: Path) -> None:
    content = made_up(tmp_path / "gpu.json")
    written = report.write(tmp_path / "gpu.json", tmp_path / "page.md", tmp_path / "plots")
    page = (tmp_path / "page.md").read_text()
    for field in ("gpu", "driver", "torch", "date", "method"):
        assert content[field] in page
    for path in ("sm90", "portable-wide"):
        assert content["paths"][path]["cubin"]["sha256"] in page
        table = page[page.index(f"## `{path}`") :].split("\n## ")[0]
        for row in content["rows"]:
            if row["path"] == path:
                tokens = report.SHORT.get(row["seq_lens"], row["seq_lens"])
                (line,) = (
                    line
                    for line in table.splitlines()
                    if line.startswith(f"| {tokens} | {row['heads']} |")
                    and (f"| {row['regime']} |" in line) == (row["state"] != "fp32")
                    and (row["state"] != "fp32" or "e-03" in line)
                )
                assert f"{row['median_us']:.1f}" in line
    assert "not measured: too slow" in page
    assert "In this run, version 0.2: 8192, 96 heads, strong, fp32; 8192, 96 heads, weak, fp32; " in page
    assert ". Not measured in it: 9, 3 heads, weak, fp32 (not run: too late)\n" in page
    named = set(re.findall(r"benchmarks/plots/(\S+?\.svg)", page))
    assert named == {file.name for file in written[1:]}
    assert len(named) == 2 * len(plots.NAMES)


def test_plots_are_drawings_for_both_backgrounds(tmp_path: Path) -> None:
    results, peers, targets = (
        made_up(tmp_path / "gpu.json"),
        *map(compare.load, (compare.PEERS_FILE, compare.TARGETS_FILE)),
    )
    for name, images in plots.draw(results, peers, targets).items():
        assert images.keys() == {"light", "dark"}
        for theme, image in images.items():
            ElementTree.fromstring(image)
            assert plots.THEMES[theme]["text"].encode() in image, name
            assert not re.search(rb"<dc:date>|#000000|#ffffff", image), (
                "a colour that one background swallows, or a date"
            )


def test_the_readme_shows_the_results(tmp_path: Path) -> None:
    content = made_up(tmp_path / "gpu.json")
    frame = f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter\n"
    text = report.readme(frame, tmp_path / "gpu.json")
    assert text.startswith(f"before\n{report.README_BEGIN}\n")
    assert text.endswith(f"{report.README_END}\nafter\n")
    assert "old" not in text
    assert "on another day, but for 58 cells of this run. " in text
    assert report.readme(text, tmp_path / "gpu.json") == text
    times = {
        (r["seq_lens"], r["heads"], r["regime"]): r["median_us"]
        for r in content["rows"]
        if r["path"] == "sm90" and r["state"] == "fp32"
    }
    line = next(line for line in text.splitlines() if line.startswith("| 8 x 1024 tokens, 96 heads |"))
    strong, weak = (f"{times['8x1024', 96, regime]:.0f}" for regime in ("strong", "weak"))
    assert line.split(" | ")[1:3] == [f"{strong} / {weak}", "1190"]
    assert "| error of outputs, relative to fp64 | 4.1e-03 | 5.7e-03 / 7.8e-03 |" in text
    for half in (report.README_BEGIN, report.README_END):
        with pytest.raises(ValueError, match="expected the lines"):
            report.readme(half, tmp_path / "gpu.json")


def test_the_kept_readme_is_of_the_newest_results() -> None:
    newest = report.newest()
    if newest is None:
        pytest.skip("no results are kept")
    text = (ROOT / "README.md").read_text()
    assert report.readme(text, newest) == text, "write it anew: python -m benchmarks report"


def test_little_data_is_drawn_too(tmp_path: Path) -> None:
    for shapes in (1, 3):
        made_up(tmp_path / "gpu.json", shapes)
        report.write(tmp_path / "gpu.json", tmp_path / "page.md", tmp_path / "plots")


def test_the_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    made_up(tmp_path / "gpu.json")
    program = (
        "import sys; from pathlib import Path; from benchmarks import report; report.write(*map(Path, sys.argv[1:]))"
    )
    contents = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "gpu.json"), str(folder / "page.md"), str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=True,
        )  # fmt: skip
        contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize("results", KEPT, ids=lambda path: path.stem)
def test_the_kept_report_is_of_the_kept_results(results: Path, tmp_path: Path) -> None:
    assert PINNED is not None
    if matplotlib.__version__ != PINNED[1]:
        pytest.skip(f"plots are drawn with matplotlib {PINNED[1]}, and this is {matplotlib.__version__}")
    page, *drawings = report.write(results, tmp_path / "page.md", tmp_path / "plots")
    cure = "write it anew: python -m benchmarks report"
    assert page.read_text() == report.page_of(results).read_text(), cure
    for drawing in drawings:
        assert drawing.read_bytes() == (report.PLOTS / drawing.name).read_bytes(), cure


def test_nothing_is_kept_beside() -> None:
    pages = {path.name for path in ROOT.glob("BENCHMARK_*.md")}
    assert pages == {report.page_of(path).name for path in KEPT}
    wanted = {f"{path.stem}-{name}-{theme}.svg" for path in KEPT for name in plots.NAMES for theme in plots.THEMES}
    assert {path.name for path in report.PLOTS.glob("*")} == wanted
