"""What the parsers of all commands share: flags with `_` or `-`, remembered when given, and short errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from accelerate.errors import CheckpointError, CommandFailed
from accelerate.text import did_you_mean


@contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """End a command with the sentence of an error instead of its traceback, since the mistake is in what was asked.

    Args:
        command: the command, which the sentence begins with.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # see `pipe_may_close`
    except (ValueError, OSError, NotImplementedError, CheckpointError, CommandFailed) as error:
        sys.exit(f"{command}: {error}")


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """End a command silently when nobody reads what it prints, as in `accelerate env | head -1`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # else it is written, and fails, when Python ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
        sys.exit(128 + 13)  # as a shell says that a program ended by SIGPIPE


def run_command(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> None:
    """Parse a command line and run the command. A mistake in what was asked ends it with one sentence.

    Args:
        parser: the parser.
        words: the words of the command line. By default those of this process.
    """
    with pipe_may_close(), one_sentence(parser.prog):
        args = parser.parse_args(words)
        args.func(args)


def _both_spellings(names: tuple[str, ...]) -> tuple[str, ...]:
    """`--a_b` -> `--a_b`, `--a-b`; the first stays the one that is shown."""
    spelled: dict[str, None] = {}
    for name in names:
        spelled[name] = None
        if name.startswith("--"):
            spelled["--" + name[2:].replace("-", "_")] = None
            spelled["--" + name[2:].replace("_", "-")] = None
    return tuple(spelled)


class _Remember:
    """Record in `namespace.nondefault` that an argument was given, whatever its value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.__dict__.setdefault("nondefault", set()).add(self.dest)  # type: ignore[attr-defined]
        super().__call__(parser, namespace, values, option_string)  # type: ignore[misc]


class _Store(_Remember, argparse._StoreAction):
    pass


class _StoreTrue(_Remember, argparse._StoreTrueAction):
    pass


class _StoreFalse(_Remember, argparse._StoreFalseAction):
    pass


class _Append(_Remember, argparse._AppendAction):
    pass


def whole_number(word: str) -> int:
    """Read an argument as an integer, with a plain message if it is not one.

    Args:
        word: the argument.
    """
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"should be a whole number, not {word!r}") from None


def at_least_one(word: str) -> int:
    """Read an argument as an integer that counts something there has to be.

    Args:
        word: the argument.
    """
    if (number := whole_number(word)) < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, not {word}")
    return number


class CustomArgumentGroup(argparse._ArgumentGroup):
    """Group arguments whose flags may be written with `_` or with `-`."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return super().add_argument(*_both_spellings(args), **kwargs)


class CustomArgumentParser(argparse.ArgumentParser):
    """Parse arguments whose flags may be written with `_` or with `-`.

    After parsing, `namespace.nondefault` is the set of arguments that were given.

    Args:
        *args: positional arguments of `argparse.ArgumentParser`.
        **kwargs: keyword arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)
        for name, action in ((None, _Store), ("store", _Store), ("append", _Append)):
            self.register("action", name, action)
        self.register("action", "store_true", _StoreTrue)
        self.register("action", "store_false", _StoreFalse)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return super().add_argument(*_both_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace = argparse.Namespace() if namespace is None else namespace
        if not hasattr(namespace, "nondefault"):
            namespace.nondefault = set()
        self._check_flags(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _check_flags(self, words: Sequence[str]) -> None:
        """Refuse a misspelled flag before a subcommand, whose value argparse would take for the subcommand."""
        commands = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for word in words if commands else ():
            if any(word in choices for choices in commands):
                return
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self._refuse([word])

    def _refuse(self, unknown: list[str]) -> NoReturn:
        words = [word + self._instead_of(word.partition("=")[0]) for word in unknown]
        self.error(f"unrecognized arguments: {' '.join(words)}")

    def _instead_of(self, word: str) -> str:
        """What to add to an error about a flag that does not exist."""
        return did_you_mean(word, self._option_string_actions)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            near = did_you_mean(str(value), choices)
            named = None if isinstance(action, argparse._SubParsersAction) else action
            raise argparse.ArgumentError(named, f"there is no {value!r}{near}; choose one of {', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        names, colon, rest = message.removeprefix("argument ").partition(": ")
        if names.startswith("-"):
            names = "/".join(shown_spellings(names.split("/")))
        if rest.startswith("ignored explicit argument"):
            rest = "this flag takes no value"
        message = names + colon + rest
        # The usage of `launch` fills two screens and would hide the sentence that matters.
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the arguments.\n")


def command_parser(
    name: str,
    subparsers: Any,
    description: str,
    kind: type[argparse.ArgumentParser] = CustomArgumentParser,
    **settings: Any,
) -> argparse.ArgumentParser:
    """Make the parser of a command.

    Args:
        name: the name of the command.
        subparsers: the subcommands of a parser, to which this one is added. None makes a parser by itself.
        description: what the command does.
        kind: the class of a parser by itself.
        **settings: other arguments of `argparse.ArgumentParser`.
    """
    if subparsers is None:
        return kind(f"accelerate {name}", description=description, **settings)
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=description, **settings)
    return parser


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Format help that shows each flag once.

    Args:
        prog: the name of the program.
        **kwargs: other arguments of an argparse formatter.
    """

    def __init__(self, prog: str, **kwargs: Any) -> None:
        kwargs.setdefault("max_help_position", 32)
        super().__init__(prog, **kwargs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = ", ".join(shown_spellings(action.option_strings))
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


def shown_spellings(names: Iterable[str]) -> list[str]:
    """Return the spellings of a flag that are shown: of those with `_` and with `-`, the first.

    Args:
        names: all spellings.
    """
    names = list(names)
    return [name for name in names if "-" not in name[2:] or name.replace("-", "_").replace("__", "--", 1) not in names]
