"""The index names every example, and nothing else."""

from __future__ import annotations

import ast
import re

import pytest

from tests.examples.running import EXAMPLES

FILES = sorted(
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*")
    if path.is_file() and not {"__pycache__", "runs", ".ipynb_checkpoints"} & set(path.parts)
)
SCRIPTS = [name for name in FILES if name.endswith(".py") and name != "tiny.py"]


def test_every_file_is_named_once() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted([*linked, "README.md"]) == FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_how_to_start_it(name: str) -> None:
    said = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    assert f"python jobs/{name[5:]}" in said if name.startswith("jobs/") else f"examples/{name}" in said
