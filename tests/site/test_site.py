"""The documentation as a site: what is in it, and what a reader meets in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.site.conftest import ROOT, Browse
from website import reference

DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="session")
def site() -> Path:
    """The site as `make docs` builds it: there a link or an anchor that leads nowhere is an error."""
    folder = ROOT / "site"
    assert (folder / "index.html").exists(), "make docs first"
    return folder


def pages_of(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


@pytest.mark.parametrize("link", ["nowhere.md", "#nothing", "other.md#nothing"])
def test_a_link_that_leads_nowhere_is_an_error(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# First\n\n[a link]({link})\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nhooks: []\nplugins: []\nnav: [index.md, other.md]\n")
    (how,) = re.findall(r"-m mkdocs (build .*)", (ROOT / "Makefile").read_text())  # as `make docs` does it
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", *how.split(), "--config-file", str(config)], capture_output=True, text=True
    )
    assert built.returncode != 0
    assert f"contains a link '{link}'" in built.stderr


class Text(HTMLParser):
    """The paragraphs of a page, without code; and all ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.paragraphs: list[str] = []
        self._inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == "id" and value}
        if tag == "p":
            self.paragraphs.append("")
        if tag in ("p", "code"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside == ["p"]:
            self.paragraphs[-1] += data


def test_no_markdown_is_left_over(site: Path) -> None:
    """A list, a table or a block that this reader of Markdown takes for a paragraph."""
    left = [
        f"{page.relative_to(site)}: {paragraph.strip()[:80]}"
        for page in pages_of(site)
        for paragraph in Text(page.read_text()).paragraphs
        if re.search(r"(^|\n)(- |\d+\. |\|)|```|\]\(|\*\*", paragraph)
    ]
    assert not left, "\n".join(left)


def test_every_public_name_is_described(site: Path) -> None:
    ids = set[str]().union(*(Text(page.read_text()).ids for page in (site / "reference").glob("*.html")))
    lacking = [name.path for name in reference.described().values() if name.path not in ids]
    assert not lacking
    for module in reference.SHORT:
        assert set(reference.public_names(module).values()) <= set(reference.described())


def test_every_flag_is_described(site: Path) -> None:
    from accelerate.config.options import OPTIONS

    launch, settings = ((site / "commands" / f"{name}.html").read_text() for name in ("launch", "settings"))
    for option in OPTIONS.values():
        assert all(f"<code>{word}</code>" in launch and f"<code>{word}</code>" in settings for word in option.spellings)


def test_guides_lead_to_the_reference(site: Path, page: Page) -> None:
    page.goto((site / "training-loop.html").as_uri())
    page.locator("article p a", has_text=re.compile("^prepare$")).first.click()
    page.wait_for_url("**/reference/accelerate.accelerator.html#accelerate.accelerator.Accelerator.prepare")


def looked_at(page: Page, place: Path) -> None:
    """Open a page and look whether it is wider than the window."""
    page.goto(place.as_uri(), wait_until="load")
    page.locator("article h1").first.wait_for()
    check_width(page, place)


def check_width(page: Page, place: Path) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{place.name} is {wide} px wider than a window of {page.evaluate('innerWidth')} px"


@pytest.mark.timeout(600)
def test_every_page_opens(site: Path, browse: Browse) -> None:
    page = browse()
    for place in pages_of(site):
        page.set_viewport_size({"width": DESKTOP, "height": 900})
        looked_at(page, place)
        page.set_viewport_size({"width": PHONE, "height": 900})
        check_width(page, place)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system(width: int, dark: bool, site: Path, browse: Browse) -> None:
    page = browse(width=width, dark=dark)
    for name in ("index", "checkpoints", "reference/accelerate.accelerator"):
        looked_at(page, site / f"{name}.html")
        assert page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
        text, paper = page.evaluate(
            """[document.querySelector("article p"), document.body].map((element, place) =>
                getComputedStyle(element)[place ? "backgroundColor" : "color"].match(/[\\d.]+/g).map(Number))"""
        )
        assert (sum(text[:3]) > sum(paper[:3])) == dark


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_search_leads_to_what_was_asked_for(width: int, site: Path, browse: Browse) -> None:
    page = browse(width=width)
    page.goto((site / "index.html").as_uri())
    if width == PHONE:
        page.locator("label[for=__search]").first.click()
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("gather_for_metrics")
    found = page.locator(
        '.md-search-result__link[href*="reference/accelerate.accelerator"]', has_text="gather_for_metrics"
    )
    found.first.wait_for()
    found.first.click()
    page.wait_for_url("**/reference/accelerate.accelerator.html**")
    heading = page.locator("#accelerate\\.accelerator\\.Accelerator\\.gather_for_metrics")
    assert "gather_for_metrics" in heading.inner_text()
    heading.scroll_into_view_if_needed()
    assert heading.is_visible()
