"""docs/architecture.md names every file of the package, with what the file itself says it is for."""

from __future__ import annotations

import ast

from tests.docs.file_map import PAGE, ROOT, with_map


def test_the_list_of_files_is_the_packages() -> None:
    page = PAGE.read_text()
    assert with_map(page) == page, "run `make file-map`"


def test_every_file_says_what_it_is_for_in_one_line() -> None:
    for path in sorted((ROOT / "src" / "accelerate").rglob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert said.partition("\n")[0].rstrip().endswith((".", "?")), path
