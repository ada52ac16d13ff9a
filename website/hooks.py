"""Hooks of MkDocs: pages that are made from the sources, and Markdown that reads on a code host as well as here."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from website import commands, crosslinks, outside, reference  # noqa: E402  (hooks are loaded by their path)

# Words that tell tests/docs how a block is run (see CONTRIBUTING.md) say nothing to a reader.
MARKERS = re.compile(r"^( *```(?:python|py|bash|shell|sh))(?: (?:example|continues|world=\d+))+ *$", re.MULTILINE)
# Pages that are made of names, which would lead to themselves.
MADE = ("reference/", "commands/")
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)" */?>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the places of the menu that are kept for what is made here."""
    made = {"PYTHON": reference.menu(), "COMMANDS": commands.menu(), "EXAMPLES": outside.menu(ROOT)}
    for section in config.nav or []:
        for title, entries in section.items():
            if isinstance(entries, list):
                section[title] = [part for entry in entries for part in _filled(entry, made)]
    return config


def _filled(entry: Any, made: dict[str, list[Any]]) -> list[Any]:
    return made[entry] if isinstance(entry, str) and entry in made else [entry]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not written in docs/: the references, and files elsewhere that pages link to."""
    made = {**reference.pages(), **commands.pages(), **outside.pages(ROOT)}
    for uri, content in made.items():
        # Those that are in the menu were put there by name; the others are reached by links.
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Blocks without their markers, links out of docs/ to pages of those files, and links to the reference."""
    markdown = outside.relinked(MARKERS.sub(r"\1", markdown), page.file.src_uri, ROOT)
    return markdown if page.file.src_uri.startswith(MADE) else crosslinks.linked(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Drawings become part of the page, so that they follow its colors, which a reader may change."""

    def drawing(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.url), found[2]))
        svg = (Path(config.docs_dir) / place).read_text()
        named = svg.replace("<svg ", f'<svg role="img" aria-label="{found[1]}" ', 1)
        return f'<span class="drawing">{named}</span>'

    return PICTURE.sub(drawing, html)
