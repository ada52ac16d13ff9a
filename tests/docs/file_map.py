"""The list of all files in docs/architecture.md, made from their docstrings: `python -m tests.docs.file_map`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: made by `make file-map` -->\n```\n", "```\n<!-- end of files -->\n"


def file_map(folder: Path = ROOT / "src" / "accelerate") -> str:
    """Every file of the package with the first line of its docstring, folder by folder."""
    return f"src/{folder.name}/\n" + "".join(_lines(folder, 1))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line("__init__.py", folder / "__init__.py", depth)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield _line(path.name, path, depth)
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            yield f"{'  ' * depth}{path.name}/\n"
            yield from _lines(path, depth + 1)


def _line(name: str, path: Path, depth: int) -> str:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return f"{'  ' * depth}{name:<{26 - 2 * depth}} {said.partition(chr(10))[0]}".rstrip() + "\n"


def with_map(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + file_map() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
