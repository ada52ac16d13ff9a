"""Looking at the code of example scripts."""

from __future__ import annotations

import ast
from pathlib import Path


def get_function_contents_by_name(lines: list[str], name: str) -> list[str]:
    """Return the lines of a function of a script, up to the next statement.

    Args:
        lines: the lines of the script.
        name: "main" or "training_function".
    """
    if name not in ("main", "training_function"):
        raise ValueError(f"{name!r} cannot be looked up; choose 'main' or 'training_function'.")
    statements = ast.parse("".join(lines)).body
    for statement, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return lines[statement.lineno - 1 : following.lineno - 1 if following else None]
    return []


def clean_lines(lines: list[str]) -> list[str]:
    """Return lines without comments and empty ones.

    Args:
        lines: the lines.
    """
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


# What every example has, with settings of its own.
_LOADERS = "train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)"
_SWITCH = "TESTING_MOCKED_DATALOADERS"


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Return the lines that an example of one feature adds to the plain example, and that a complete example lacks.

    Args:
        base_filename: the complete example.
        feature_filename: the example of the feature.
        parser_only: compare `main`, where options are declared, instead of `training_function`.
        secondary_filename: the plain example that the complete one grew out of, if not `examples/nlp_example.py`.
    """
    name = "main" if parser_only else "training_function"
    template = Path("examples", "nlp_example.py")
    plain = set(_function(template, name))
    complete = _new_lines(_function(base_filename, name), plain)
    missing = [line for line in _new_lines(_function(feature_filename, name), plain) if line not in complete]
    if secondary_filename is None:
        return missing
    # Lines of the other plain example that the complete one has no use for.
    foreign = set(_lines(template)) - set(_function(secondary_filename, name))
    return [line for line in missing if line not in foreign]


def _lines(path: str | Path) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines(keepends=True)


def _function(path: str | Path, name: str) -> list[str]:
    return clean_lines(get_function_contents_by_name(_lines(path), name))


def _new_lines(lines: list[str], plain: set[str]) -> list[str]:
    """The lines that are not in the plain example, without the switch to mocked loaders and what it guards."""
    found, after_switch = [], False
    for line in lines:
        switch = _SWITCH in line
        if not switch and not after_switch and line not in plain and line.strip() != _LOADERS:
            found.append(line)
        after_switch = switch
    return found
