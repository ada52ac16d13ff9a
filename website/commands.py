"""The reference of commands, from the parsers and the table of settings that they are made of."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from accelerate.commands.accelerate_cli import COMMANDS
from accelerate.config.options import FAMILIES, FILE_ONLY, Family, Option

# Commands within a command have sections of their own, and what `--help` does is known.
NO_ROW = (argparse._SubParsersAction, argparse._HelpAction)
# argparse's own titles.
PLAINER = {"positional arguments": "Arguments", "options": "Flags", "optional arguments": "Flags"}
# How often a word may be given, as it is shown.
REPEATED = {"?": "[{}]", "*": "[{} ...]", "...": "[{} ...]"}


def menu() -> list[Any]:
    """The part of the menu with these pages."""
    return [{"Commands": ["commands/index.md", *(f"commands/{name}.md" for name in COMMANDS), "commands/settings.md"]}]


def pages() -> dict[str, str]:
    """A page for each command, and one for the settings of a launch: flag, key of the config file and variable."""
    made = {"commands/index.md": _index(), "commands/settings.md": _settings()}
    for name, (place, line) in COMMANDS.items():
        module, function = place.split(":")
        made[f"commands/{name}.md"] = _command(name, line, getattr(importlib.import_module(module), function)(None))
    return made


def _index() -> str:
    lines = [
        "# Commands",
        "",
        "`accelerate <command> --help` shows the same in the terminal, and `python -m accelerate` is the `accelerate`",
        "of that very Python. Flags may be written with `_` or with `-`.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [f"| [`accelerate {name}`]({name}.md) | {line} |" for name, (_, line) in COMMANDS.items()]
    lines += [
        "",
        "[Settings of a launch](settings.md): every flag with its key in the config file and its variable.",
        "",
    ]
    return "\n".join(lines)


def _command(name: str, line: str, parser: argparse.ArgumentParser) -> str:
    title = f"# accelerate {name}\n\n{parser.description or line}\n\n"
    return title + "\n".join(_sections(name, parser, 2))


def _sections(name: str, parser: argparse.ArgumentParser, level: int) -> Iterable[str]:
    """The groups of a parser's arguments; commands within the command come after its own."""
    yield from ("```text", _usage(parser), "```", "")
    inner: list[argparse._SubParsersAction[Any]] = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        inner += [action for action in actions if isinstance(action, argparse._SubParsersAction)]
        rows = [_row(action) for action in actions if not isinstance(action, NO_ROW)]
        if rows:
            title = PLAINER.get(group.title or "", group.title)
            yield from (f"{'#' * level} {title}", "", group.description or "", "")
            yield from ("| argument | what it says | default |", "|---|---|---|", *rows, "")
    for action in inner:
        for word, sub in action.choices.items():
            yield from (f"{'#' * level} accelerate {name} {word}", "", sub.description or "", "")
            yield from _sections(f"{name} {word}", sub, level + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog if parser.prog.startswith("accelerate") else f"accelerate {parser.prog}", "[flags]"]
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            words.append(REPEATED.get(str(action.nargs), "{}").format(_word(action)))
    return " ".join(words)


def _word(action: argparse.Action) -> str:
    """What an argument without a flag is called; one that only stands for more words has no name to show."""
    return str(action.dest if action.metavar in (None, "...") else action.metavar)


def _row(action: argparse.Action) -> str:
    shown = ", ".join(f"`{word}`" for word in _once(action.option_strings)) or f"`{_word(action)}`"
    said = str(action.help or "")
    if action.choices is not None:
        said += f" ({', '.join(f'`{choice}`' for choice in action.choices)})"
    default = "" if action.default in (None, False, argparse.SUPPRESS, [], "") else f"`{action.default}`"
    return f"| {shown} | {_cell(said)} | {_cell(default)} |"


def _once(spelled: Sequence[str]) -> list[str]:
    """Each flag in one spelling: that with `-` between its words is the same flag."""
    kept: dict[str, str] = {}
    for word in spelled:
        kept.setdefault("--" + word[2:].replace("-", "_") if word.startswith("--") else word, word)
    return list(kept.values())


def _settings() -> str:
    lines = [
        "# Settings of a launch",
        "",
        "Each setting is declared once. Its flag of `accelerate launch`, its key in the config file and the variable",
        "that carries it to the processes are derived from that declaration.",
        "[Where a setting comes from](../launching.md#where-a-setting-comes-from) says which of them takes precedence.",
        "",
    ]
    for family in FAMILIES:
        lines += [f"## {family.title}", "", family.help, ""]
        if family.section:
            lines += [f"In the config file, these are keys of the section `{family.section}`.", ""]
        lines += ["| flag | key in the config file | variable | what it says |", "|---|---|---|---|"]
        lines += [_setting(family, option) for option in family.options]
        lines.append("")
    keys = ", ".join(f"`{option.name}`" for option in FILE_ONLY.options)
    lines += ["## Only in the config file", "", f"{keys}: `accelerate config` writes them.", ""]
    return "\n".join(lines)


def _setting(family: Family, option: Option) -> str:
    key = family.key_of(option) if family.section else option.file_key
    flags = ", ".join(map(_code, option.spellings))
    return f"| {flags} | {_code(key)} | {_code(option.env)} | {_said(option)} |"


def _said(option: Option) -> str:
    said = option.help
    if option.choices:
        choices = [f"`{value}`" + (f": {meaning}" if meaning else "") for value, meaning in option.choices.items()]
        said += "<br>" + ("<br>" if any(option.choices.values()) else ", ").join(choices)
    return _cell(said)


def _code(word: str) -> str:
    return f"`{word}`" if word else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
