"""Asking in a terminal: with arrows, defaults, and a reason where a default was found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.config.options import FLAG, Option
from accelerate.config.options.base import YES_NO, YES_NO_DIGIT, YES_NO_WORD

_YES_NO = (FLAG, YES_NO, YES_NO_WORD, YES_NO_DIGIT)


def choose(question: str, choices: Mapping[str, str], default: str, reason: str = "") -> str:
    """One of several answers, each with a line that explains it."""
    import questionary

    width = max(map(len, choices))
    listed = [
        questionary.Choice(f"{value:<{width}}  {explained}".rstrip(), value=value)
        for value, explained in choices.items()
    ]
    _say(reason)
    # Not through `default=`, which would compare titles in some versions.
    start = next(choice for choice in listed if choice.value == default)
    return str(questionary.select(question, choices=listed, default=start).unsafe_ask())


def confirm(question: str, default: bool, reason: str = "") -> bool:
    """Yes or no."""
    import questionary

    _say(reason)
    return bool(questionary.confirm(question, default=default).unsafe_ask())


def text(question: str, default: Any, read: Callable[[str], Any], reason: str = "") -> Any:
    """A word or a number; asked again until it can be read. Nothing typed and no default is None."""
    import questionary

    def check(answer: str) -> bool | str:
        try:
            if answer:
                read(answer)
        except ValueError as error:
            return f"It {error}."
        return True

    _say(reason)
    answer = questionary.text(question, default="" if default is None else str(default), validate=check).unsafe_ask()
    return read(answer) if answer else None


def ask(option: Option, default: Any = None, reason: str = "", choices: Mapping[str, str] | None = None) -> Any:
    """The question that a setting declares, in the form that suits its values."""
    default = option.default if default is None else default
    choices = option.choices if choices is None else choices
    if choices:
        return choose(option.question, choices, str(default if default is not None else next(iter(choices))), reason)
    if option.kind in _YES_NO:
        return confirm(option.question, option.kind.read(default) in (True, "true"), reason)
    return text(option.question, default, option.read, reason)


def _say(reason: str) -> None:
    if reason:
        from rich.console import Console

        Console(highlight=False).print(f"  ({reason})", style="dim", markup=False)
