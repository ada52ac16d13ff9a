"""Files outside docs/ that pages link to: each gets a page of its own on the site, and the links lead there."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
# On the site although no page links there, by their place in the menu.
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
# The landing page of the site says what this one says on a code host.
HOME = "README.md"


def pages(root: Path) -> dict[str, str]:
    """Every such file, by the place of its page."""
    made: dict[str, str] = {}
    waiting = [
        *ALWAYS,
        *(target for page in sorted((root / "docs").rglob("*.md")) for target in _targets(page, root)),
    ]
    while waiting:
        path = waiting.pop()
        if path == HOME or _uri(path) in made:
            continue
        file = root / path
        made[_uri(path)] = _page(file)
        if file.suffix == ".md":
            waiting += _targets(file, root)
    return made


def relinked(markdown: str, uri: str, root: Path) -> str:
    """The Markdown of a page, with links to such files leading to their pages."""
    origin = _origin(uri, root)

    def lead(found: re.Match[str]) -> str:
        path = _resolve(origin, found[2])
        if origin.startswith("docs/") and (path is None or path.startswith("docs/") or not _exists(root, path)):
            return found[0]
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
    """Where the page of a file is on the site."""
    if path == HOME:
        return "index.md"
    if path.endswith("/README.md"):
        return path
    stem, suffix = posixpath.splitext(path)
    return f"{stem.lower()}.md" if suffix in (".md", ".py") else f"{path}.md"


def _origin(uri: str, root: Path) -> str:
    """The file that a page was made of."""
    for path in (f"docs/{uri}", uri, uri.upper().replace(".MD", ".md")):
        if (root / path).is_file() and (path.startswith("docs/") or path != HOME):
            return path
    return f"docs/{uri}"


def _page(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".md":
        return text
    language = LANGUAGES.get(file.suffix, "text")
    title = f"# {file.name}\n\n"
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
        title += f"{said}\n\n"
    return f"{title}````{language}\n{text}````\n"
