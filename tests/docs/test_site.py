"""The built site: complete, whole in its links, and readable in a browser, on a phone too."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser as browsers
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOREIGN = ("http:", "https:", "mailto:", "data:")


class Page(HTMLParser):
    """Names that a page defines, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.references: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.names.add(value or "")
            elif name in ("href", "src"):
                self.references.append(value or "")


def broken_links(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for reference in page.references:
            url = urllib.parse.urlparse(reference)
            if reference.startswith(FOREIGN) or reference == "#":
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            named = not url.fragment or target not in pages or urllib.parse.unquote(url.fragment) in pages[target].names
            if not target.is_file() or not named:
                broken.append(f"{path.relative_to(site)}: {reference}")
    return broken


def test_links_lead_somewhere(site: Path) -> None:
    assert broken_links(site.resolve()) == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"><a href="b.html#not"><a href="c.html"><img src="x.svg"><a href="https://example.org/x"><a href="#me" id="me">'
    )
    (tmp_path / "b.html").write_text('<p id="there">')
    assert broken_links(tmp_path.resolve()) == ["a.html: b.html#not", "a.html: c.html", "a.html: x.svg"]


@pytest.mark.parametrize("page", [path.name for path in ROOT.glob("*.md")])
def test_files_beside_link_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    local = [link for pair in targets for link in pair if link and not link.startswith((*FOREIGN, "#"))]
    assert [link for link in local if not (ROOT / link.split("#")[0]).exists()] == []


def test_every_page_is_there(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert sources <= built
    api = (site / "api.html").read_text(encoding="utf-8")
    for name in (
        "flash_kda.fwd",
        "flash_kda.get_workspace_size",
        "flash_kda.is_available",
        "flash_kda.reference.recurrent",
    ):
        assert f'id="{name}"' in api


def test_plots_of_kept_results_are_shown(site: Path) -> None:
    page = (site / "benchmarks.html").read_text(encoding="utf-8")
    for plot in (ROOT / "benchmarks" / "plots").glob("*.svg"):
        assert f'src="_static/{plot.name}"' in page
    assert "<picture>" not in page


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    try:
        with browsers.browser() as started:
            yield started
    except browsers.NoBrowser as error:
        pytest.skip(f"no browser: {error}")


def addresses(site: Path) -> list[str]:
    leave_out = ("genindex.html", "search.html", "py-modindex.html")
    return [path.as_uri() for path in sorted(site.rglob("*.html")) if path.name not in leave_out]


def test_pages_load_without_complaint(site: Path, chromium: Any) -> None:
    """On a desk, light and dark: no message in the console, no missing file, no request to the network."""
    pages = addresses(site)
    assert len(pages) > 12
    for page in pages:
        for scheme in ("light", "dark"):
            assert chromium.open(page, browsers.DESK, scheme) == [], page
            assert len(chromium.evaluate("document.querySelector('article').innerText")) > 100, page


def test_pages_fit_a_phone(site: Path, chromium: Any) -> None:
    """Nothing sticks out to the side, text is not tiny, and the menu opens."""
    width = browsers.PHONE["width"]
    for page in addresses(site):
        assert chromium.open(page, browsers.PHONE) == [], page
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width, page
        outside = chromium.evaluate(
            "[...document.querySelectorAll('article p, article h1, article h2, article li, article img, article svg')]"
            ".filter(e => !e.closest('table, pre') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
        )
        assert outside == [], page
        size = chromium.evaluate("parseFloat(getComputedStyle(document.querySelector('article p')).fontSize)")
        assert size >= 14, page
    assert chromium.evaluate("getComputedStyle(document.querySelector('.sidebar-drawer')).left[0]") == "-"
    chromium.evaluate("document.querySelector('label[for=\"__navigation\"]').click()")
    chromium.evaluate("new Promise(done => setTimeout(done, 600))")
    assert "Kimi Delta Attention" in chromium.evaluate("document.querySelector('.sidebar-drawer').innerText")


def test_the_browser_sees_trouble(tmp_path: Path, chromium: Any) -> None:
    page = tmp_path / "page.html"
    head = '<!doctype html><meta name="viewport" content="width=device-width"><article>'
    page.write_text(f"{head}<script>console.error('oh')</script><img src='none.png'><p style='width:900px'>wide")
    said = " ".join(chromium.open(page.as_uri(), browsers.PHONE))
    assert "oh" in said
    assert "not loaded" in said
    assert chromium.evaluate("document.documentElement.scrollWidth") > browsers.PHONE["width"]
    page.write_text(f"{head}<script src='http://127.0.0.1:1/x.js'></script><script>undefined.x</script>")
    said = " ".join(chromium.open(page.as_uri()))
    assert "asks the network for http://127.0.0.1:1/x.js" in said
    assert "exception" in said
