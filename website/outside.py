"""Files outside docs/ that pages link to: each gets a page of its own on the site, and the links lead there."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
# The landing page of the site says what this one says on a code host.
HOME = "README.md"
EXAMPLES = "examples/README.md"
# On the site although no page links there, by their place in the menu.
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", EXAMPLES)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def menu(root: Path) -> list[Any]:
    """The part of the menu with the index of examples, where there is one."""
    return [{"Examples": _uri(EXAMPLES)}] if (root / EXAMPLES).exists() else []


def pages(root: Path) -> dict[str, str]:
    """The pages of all such files, by their place."""
    files.cache_clear()
    return {uri: _page(root / path) for uri, path in files(root).items()}


@cache
def files(root: Path) -> dict[str, str]:
    """Every such file, by the place of its page."""
    found: dict[str, str] = {}
    documents = sorted((root / "docs").rglob("*.md"))
    waiting = [
        *(path for path in ALWAYS if (root / path).exists()),
        *(target for page in documents for target in _targets(page, root)),
    ]
    while waiting:
        path = waiting.pop()
        if path == HOME or _uri(path) in found:
            continue
        found[_uri(path)] = path
        if path.endswith(".md"):
            waiting += _targets(root / path, root)
    return found


def relinked(markdown: str, uri: str, root: Path) -> str:
    """The Markdown of a page, with links to such files, and from them, leading to their pages."""
    origin = files(root).get(uri, f"docs/{uri}")

    def lead(found: re.Match[str]) -> str:
        path = _resolve(origin, found[2])
        if path is None or not _exists(root, path):
            return found[0]
        there = path.removeprefix("docs/") if path.startswith("docs/") else _uri(_file(root, path))
        return f"{found[1]}{posixpath.relpath(there, posixpath.dirname(uri) or '.')}{found[3]}"

    return LINK.sub(lead, markdown)


def _targets(page: Path, root: Path) -> Iterator[str]:
    """What a page links to outside docs/."""
    origin = page.relative_to(root).as_posix()
    for _, target, _ in LINK.findall(page.read_text()):
        path = _resolve(origin, target)
        if path is not None and not path.startswith("docs/") and _exists(root, path):
            yield _file(root, path)


def _resolve(origin: str, target: str) -> str | None:
    """A link of a file as a path from the root; None for one that leaves the repository."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return None if path.startswith("..") else path


def _exists(root: Path, path: str) -> bool:
    file = root / path
    return file.is_file() or (file / "README.md").is_file()


def _file(root: Path, path: str) -> str:
    """A folder stands for the page in it."""
    return posixpath.join(path, "README.md") if (root / path).is_dir() else path


def _uri(path: str) -> str:
    """Where the page of a file is on the site. Only the first is an `index`: that would stand for its section."""
    if path == HOME:
        return "index.md"
    folder, name = posixpath.split(path)
    if name == "README.md":
        return posixpath.join(folder, "overview.md")
    stem, suffix = posixpath.splitext(path)
    return f"{stem.lower()}.md" if suffix in (".md", ".py") else f"{path}.md"


def _page(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".md":
        return text
    if file.suffix == ".ipynb":
        return _notebook(json.loads(text)["cells"])
    said = ast.get_docstring(ast.parse(text)) or "" if file.suffix == ".py" else ""
    return f"# {file.name}\n\n{said}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}````\n"


def _notebook(cells: list[dict[str, Any]]) -> str:
    """The text of a notebook, and its code as blocks."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(f"````python\n{source}\n````" if cell["cell_type"] == "code" else source)
    return "\n\n".join(parts) + "\n"
