"""Asking in a terminal: with arrows, defaults, and a reason where a default was found out."""

from __future__ import annotations

import functools
import shutil
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from accelerate.config.options import FLAG, Option
from accelerate.config.options.base import YES_NO, YES_NO_DIGIT, YES_NO_WORD

# What a config file answered that is about to be replaced, by the name of the setting.
earlier: dict[str, Any] = {}

# Columns behind a question: "(Use arrow keys)", "(y/N) ", or what is typed.
ROOM_FOR_ANSWER = 20

_YES_NO = (FLAG, YES_NO, YES_NO_WORD, YES_NO_DIGIT)

P = ParamSpec("P")
R = TypeVar("R")


class _Back(Exception):
    """Esc: back to the question before."""


class _Answers:
    """Those given so far, in order, each with its question. After Esc they are given again, unasked, up to the last."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []
        self.repeated = 0
        self.taken_back: dict[str, Any] = {}  # by question: what is suggested when it is asked again

    def take_back(self) -> None:
        if self.given:
            question, answer = self.given.pop()
            self.taken_back[question] = answer


_answers = _Answers()


def with_steps_back(ask_all: Callable[[], R]) -> R:
    """Ask one question after the other. Esc goes back to the previous one."""
    while True:
        _answers.repeated = 0
        try:
            return ask_all()
        except _Back:
            _answers.take_back()


def _one_step(asks: Callable[Concatenate[str, P], R]) -> Callable[Concatenate[str, P], R]:
    @functools.wraps(asks)
    def step(question: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if _answers.repeated == len(_answers.given):
            _answers.given.append((question, asks(question, *args, **kwargs)))
        _answers.repeated += 1
        answer: R = _answers.given[_answers.repeated - 1][1]
        return answer

    return step


def _answer(question: Any) -> Any:
    from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

    keys = KeyBindings()
    keys.add("escape", eager=True)(lambda event: event.app.exit(exception=_Back))
    question.application.key_bindings = merge_key_bindings([question.application.key_bindings, keys])
    return question.unsafe_ask()


@_one_step
def choose(question: str, choices: Mapping[str, str], default: str, reason: str = "") -> str:
    """One of several answers, each with a line that explains it."""
    import questionary

    taken_back = str(_answers.taken_back.get(question))
    default = taken_back if taken_back in choices else default
    width = max(map(len, choices))
    room = (
        shutil.get_terminal_size().columns - 4
    )  # for the arrow, and so that nothing is broken in the middle of a word
    listed = [
        questionary.Choice(_cut(f"{value:<{width}}  {explained}".rstrip(), room), value=value)
        for value, explained in choices.items()
    ]
    # Not through `default=`, which would compare titles in some versions.
    start = next(choice for choice in listed if choice.value == default)
    shown = _with_reasons(question, reason)
    # The list goes, and the answer stays without its explanation.
    answer = str(_answer(questionary.select(shown, choices=listed, default=start, erase_when_done=True)))
    questionary.print(f"? {question} {answer}")
    return answer


def _cut(line: str, room: int) -> str:
    return line if len(line) <= room else f"{line[: room - 1].rsplit(' ', 1)[0]}…"


@_one_step
def confirm(question: str, default: bool, reason: str = "") -> bool:
    """Yes or no."""
    import questionary

    return bool(
        _answer(questionary.confirm(_explained(question, reason), default=_answers.taken_back.get(question, default)))
    )


@_one_step
def text(question: str, default: Any, read: Callable[[str], Any], reason: str = "", *, needed: bool = False) -> Any:
    """A word or a number; asked again until it can be read. Nothing typed is None, unless it is needed."""
    import questionary

    def check(answer: str) -> bool | str:
        try:
            if answer:
                read(answer)
            elif needed:
                return "It is needed."
        except ValueError as error:
            return f"It {error}."
        return True

    default = _answers.taken_back.get(question, default)
    shown = "" if default is None else str(default)
    answer = _answer(questionary.text(_explained(question, reason), default=shown, validate=check))
    return read(answer) if answer else None


def ask(
    option: Option,
    default: Any = None,
    reason: str = "",
    choices: Mapping[str, str] | None = None,
    *,
    needed: bool = False,
    anew: bool = False,
) -> Any:
    """The question that a setting declares, in the form that suits its values.

    default: what is suggested, unless the file that is replaced has an answer.
    anew: suggest it whatever the file says, which answered for something else.
    """
    default = option.default if default is None else default
    choices = option.choices if choices is None else choices
    default, reason = (default, reason) if anew else _answered(option, choices, default, reason)
    if choices:
        return choose(option.question, choices, str(default if default is not None else next(iter(choices))), reason)
    if option.kind in _YES_NO:
        return confirm(option.question, option.kind.read(default) in (True, "true"), reason)
    return text(option.question, default, option.read, reason, needed=needed)


def _answered(option: Option, choices: Mapping[str, str], default: Any, reason: str) -> tuple[Any, str]:
    """The answer of the file that is replaced, where it is one that can be given."""
    if (value := earlier.get(option.name)) is None:
        return default, reason
    try:
        value = option.read(value)
    except ValueError:
        return default, reason
    value = next((choice for choice in choices if choice.lower() == str(value).lower()), None) if choices else value
    return (default, reason) if value is None else (value, "from the file")


def _explained(question: str, reason: str) -> str:
    """The question, then what explains it and the reason of the suggestion, both in brackets."""
    question, _, more = question.partition("? ")
    return _with_reasons(f"{question.removesuffix('?')}?", more.strip("()."), reason)


def _with_reasons(question: str, *reasons: str) -> str:
    """The question with its reasons: in one line where that leaves room for the answer, else in lines below, which the
    terminal need not break in the middle of a word."""
    room = shutil.get_terminal_size().columns - ROOM_FOR_ANSWER
    words = f"({'; '.join(reason for reason in reasons if reason)})"
    if words == "()":
        return question
    if len(f"? {question} {words}") <= room:
        return f"{question} {words}"
    return f"{question}\n{textwrap.fill(words, max(room, 40), initial_indent='  ', subsequent_indent='   ')}"
