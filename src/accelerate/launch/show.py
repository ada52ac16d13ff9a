"""Printing a plan: its commands, its variables, and where each setting came from."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from accelerate.config.options import OPTIONS, family_of
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.settings import Settings

# Kept out of what is printed.
_SECRETS = ("aws_access_key_id", "aws_secret_access_key")


def show(plan: LaunchPlan, settings: Settings) -> None:
    """Prints to the terminal, or as plain text where there is none."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    # Lines of a file or a pipe are not broken: they are read by programs.
    console = Console(width=None if terminal else 10_000, highlight=False, soft_wrap=not terminal)
    heading = "bold" if terminal else ""
    console.print(f"Plan: {plan.engine}", style=heading, markup=False)
    console.print("\nCommand", style=heading)
    console.print(f"  {shlex.join(plan.argv)}", markup=False)
    if plan.each:
        console.print("\nEach process", style=heading)
        console.print(f"  {shlex.join(plan.each)}", markup=False)
    for name, words in plan.machines.items():
        console.print(f"\nFor {name}", style=heading, markup=False)
        console.print(f"  {shlex.join(words)}", markup=False)
    console.print("\nVariables", style=heading)
    for name in sorted(plan.env):
        console.print(f"  {name}={plan.env[name]}", markup=False)
    console.print("\nSettings", style=heading)
    _table(console, _rows(settings), terminal)
    refused = [f"{plan.refused[0]} is not part of this version: {plan.refused[1]}"] if plan.refused else []
    missing = [plan.missing] if plan.missing else []
    notes = [note for note in plan.notes if note != f"starting {plan.engine}"]  # which is the heading
    for note in [*settings.notes, *notes, *refused, *missing]:
        console.print(f"\nNote: {note}", markup=False)


def _rows(settings: Settings) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, option in OPTIONS.items():
        setting = settings.of[name]
        if setting.source == "default" and not _matters(settings, name):
            continue
        value = "***" if name in _SECRETS and setting.value else _text(setting.value)
        rows.append((option.spellings[-1].lstrip("-"), value, setting.source, setting.reason))
    return rows


def _matters(settings: Settings, name: str) -> bool:
    """Defaults of engines and formats that are not used are left out."""
    family = family_of(name)
    if family.switch:
        return bool(settings.of[family.switch].value)
    if family.section == "fp8_config":
        return bool(settings.mixed_precision == "fp8")
    return family.title not in ("TPU", "AWS", "MPI")


def _table(console: Any, rows: list[tuple[str, str, str, str]], terminal: bool) -> None:
    if not terminal:
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for name, value, source, reason in rows:
            line = f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source:<{widths[2]}}  {reason}"
            console.print(line.rstrip(), markup=False)
        return
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    for heading in ("setting", "value", "from", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "-"
