"""Looking at the code of example scripts."""

from __future__ import annotations

import ast


def get_function_contents_by_name(lines: list[str], name: str) -> list[str]:
    """Returns the lines of `main` or `training_function` of a script, up to the next statement."""
    if name not in ("main", "training_function"):
        raise ValueError(f"{name!r} cannot be looked up; choose 'main' or 'training_function'.")
    statements = ast.parse("".join(lines)).body
    for statement, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return lines[statement.lineno - 1 : following.lineno - 1 if following else None]
    return []


def clean_lines(lines: list[str]) -> list[str]:
    """Leaves out comments and empty lines."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
