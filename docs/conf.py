"""The documentation site: ``python -m sphinx -W --keep-going docs build/site``. Builds without network; the pages ask for none."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for docstrings; an installed flash_kda goes before the tree's

project = "flash_kda"
version = release = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]
highlight_language = "text"

myst_heading_anchors = 3

autodoc_typehints = "none"  # dtypes and shapes say more, and are in the docstrings
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"flash_kda {release}"
html_static_path = ["_static"]
if (ROOT / "benchmarks" / "plots").is_dir():
    html_static_path.append("../benchmarks/plots")
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}

PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="benchmarks/plots/([^"]+)">\s*<img alt="([^"]*)" src="benchmarks/plots/([^"]+)">\s*</picture>'
)


def show_plots(app: Any, docname: str, source: list[str]) -> None:
    """Plots of BENCHMARK_*.md: here the theme has a switch, which <picture> would not see."""
    if docname == "benchmarks":
        pages = sorted(ROOT.glob("BENCHMARK_*.md"))
        text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        text = re.sub("^#", "##", text, flags=re.MULTILINE)  # below the title of this page
        source[0] += PICTURE.sub(
            r'<img class="only-dark" alt="\2" src="_static/\1"><img class="only-light" alt="\2" src="_static/\3">', text
        )


def setup(app: Any) -> None:
    app.connect("source-read", show_plots)
