"""What one setting is: its flag, its place in the config file, its variable, its question, its help, its check."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.environment import str_to_bool
from accelerate.text import did_you_mean


@dataclass(frozen=True)
class Kind:
    """How the values of a setting are read from a word, checked and written into a variable."""

    name: str  # completes the sentence "... should be <name>"
    read: Callable[[Any], Any]
    write: Callable[[Any], str] = str
    placeholder: str = "TEXT"  # stands for a value in the help

    def shown(self, value: Any) -> str:
        """A value as it is typed."""
        if isinstance(value, (list, tuple)):
            return ",".join(map(self.shown, value))
        words = {"True": "yes", "False": "no", "true": "yes", "false": "no"}
        return words.get(str(value), str(value)) if "yes or no" in self.name else str(value)

    def check(self, value: Any) -> Any:
        try:
            return self.read(value)
        except (TypeError, ValueError):
            raise ValueError(f"should be {self.name}, not {value!r}") from None


def _whole(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError
    return int(value)


def _within(read: Callable[[Any], Any], least: float, most: float = sys.maxsize) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = read(value)
        if not least <= number <= most:
            raise ValueError
        return number

    return checked


def _or_auto(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if value == "auto" else read(value)


def _address(value: Any) -> str:
    text = str(value)
    if re.search(r"\s", text) or text.count(":") == 1:  # IPv6 has several
        raise ValueError
    return text


def _streams(value: Any) -> str:
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", str(value)):
        raise ValueError
    return str(value)


def _machines(value: Any) -> str:
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(value))
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ValueError
    return str(value)


def _pairs(value: Any) -> str:
    if not all(re.fullmatch(r"\s*[^\s=]+=.+", pair) for pair in str(value).split(",") if value):
        raise ValueError
    return str(value)


def _yes_no(value: Any) -> bool:
    return value if isinstance(value, bool) else bool(str_to_bool(str(value) or "no"))


def _yes_no_word(value: Any) -> str:
    return str(_yes_no(value)).lower()


def _three_yes_no(value: Any) -> tuple[Any, ...]:
    parts = tuple(value) if isinstance(value, (list, tuple)) else str(value).split(",")
    if len(parts) != 3:
        raise ValueError
    return tuple(_yes_no(part) for part in parts)


def _lower(value: Any) -> str:
    return str(value).lower()


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


TEXT = Kind("a word", str)
LOWER = Kind("a word", str, _lower)
WHOLE = Kind("a whole number", _whole, placeholder="N")
AT_LEAST_ONE = Kind("a whole number of at least 1", _within(_whole, 1), placeholder="N")
NOT_NEGATIVE = Kind("a whole number of at least 0", _within(_whole, 0), placeholder="N")
SECONDS = Kind("0 or more seconds", _within(float, 0), placeholder="X")
ADDRESS = Kind("an address without spaces and without a port, which is a setting of its own", _address)
PORT = Kind("a port from 0 to 65535", _within(_whole, 0, 65535), placeholder="N")
STREAMS = Kind("0, 1, 2 or 3, or one of them per process such as `0:3,1:1`", _streams, placeholder="N")
MACHINES = Kind("a number of machines, or a minimum and a maximum such as `1:2`", _machines, placeholder="N[:M]")
PAIRS = Kind("names and values such as `timeout=900,is_host=1`", _pairs)
NUMBER = Kind("a number", float, placeholder="X")
STAGE = Kind("a stage from 0 to 3", _within(_whole, 0, 3), placeholder="0|1|2|3")
WHOLE_OR_AUTO = Kind("a whole number or `auto`", _or_auto(_whole), placeholder="N")
NUMBER_OR_AUTO = Kind("a number or `auto`", _or_auto(float), placeholder="X")
FLAG = Kind("yes or no", _yes_no)
YES_NO = Kind("yes or no", _yes_no, placeholder="yes|no")
# Carried as the words `true` and `false`, on the command line and in the variable.
YES_NO_WORD = Kind("yes or no", _yes_no_word, _lower, "yes|no")
YES_NO_DIGIT = Kind("yes or no", _yes_no, lambda value: str(int(_yes_no(value))), "yes|no")
THREE_YES_NO = Kind("three values of yes or no, such as `yes,no,no`", _three_yes_no, placeholder="A,B,C")
# A mapping in a file, and one word everywhere else.
JSON = Kind("a JSON object", _json, placeholder="JSON")
WORDS = Kind("words", list)


# Choices that are taken, and not shown.
MISSPELT = ("torhchxla_trace_once",)


@dataclass(frozen=True)
class Option:
    """One setting. Everything that shows it or carries it is derived from here.

    name: of the attribute in a namespace, and of the flag unless `flags` says otherwise.
    choices: the values it may take, each with what it means.
    key: its name in the config file when that is another one; "" when it is not kept there.
    env: the variable that carries it to the workers, if its family does not say it for all.
    question: what `accelerate config` asks; without one it does not ask.
    """

    name: str
    help: str
    kind: Kind = TEXT
    default: Any = None
    choices: Mapping[str, str] = field(default_factory=dict)
    question: str = ""
    env: str | None = None
    key: str | None = None
    flags: tuple[str, ...] = ()
    negative: str = ""  # a flag that says no

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.flags or (f"--{self.name}",)

    @property
    def offered(self) -> list[str]:
        """The choices, without those that are only taken."""
        return [choice for choice in self.choices if choice not in MISSPELT]

    @property
    def file_key(self) -> str:
        return self.name if self.key is None else self.key

    def check(self, value: Any) -> Any:
        """The value as it should be, or a ValueError that names the flag."""
        if value is None:
            return None
        try:
            return self.read(value)
        except ValueError as error:
            raise ValueError(f"`{self.spellings[-1]}` {error}.") from None

    def read(self, value: Any) -> Any:
        """The value as it should be, or a ValueError that goes on after the name of the setting."""
        value = self.kind.check(value)
        return self._among_choices(value) if self.choices else value

    def _among_choices(self, value: Any) -> Any:
        # Files of older versions write some of these in capitals, the command line in small letters.
        for choice in self.choices:
            if str(value).lower() == choice.lower():
                return choice
        near = did_you_mean(str(value).lower(), self.offered)
        raise ValueError(f"should be one of {', '.join(self.offered)}, not {value!r}{near}")


@dataclass(frozen=True)
class Family:
    """Settings that belong together: a heading in the help, and maybe a section of the config file.

    section: the key of that section; its keys may leave out `prefix`.
    short_keys: the section is written without the prefix.
    variables: the variable of a setting is this, and its name in capitals.
    switch: the setting that turns the family on; its variables are set only then.
    absent: its settings are read and carried, but what they are for is not part of this version.
    """

    title: str
    help: str
    options: tuple[Option, ...]
    section: str = ""
    prefix: str = ""
    short_keys: bool = False
    variables: str | None = None
    switch: str = ""
    absent: bool = False

    def option_for_key(self, key: str) -> Option | None:
        """The setting that a key of the section means, with the prefix or without."""
        names = (key, self.prefix + key)
        return next((option for option in self.options if option.name in names), None)

    def key_of(self, option: Option) -> str:
        """How the section calls a setting."""
        return option.name.removeprefix(self.prefix) if self.short_keys else option.name

    def variable_of(self, option: Option) -> str:
        """The variable that carries a setting to the workers; "" for none."""
        if option.env is None:
            return "" if self.variables is None else self.variables + option.name.upper()
        return option.env
