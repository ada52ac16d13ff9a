"""`accelerate completion`: what a shell needs to complete commands, flags and their values.

The scripts hold all of it, so that a press of the tab key starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.commands.utils import command_parser, shown_spellings
from accelerate.config.options import OPTIONS


@dataclass(frozen=True)
class Flag:
    """A flag as a shell sees it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]  # where only some are possible


@dataclass(frozen=True)
class Command:
    """A command as a shell sees it."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  # that may follow it
    runs_script: bool  # and leaves all that follows a script to the script


def completion_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate completion`."""
    description = 'Print a script that completes accelerate\'s commands: eval "$(accelerate completion bash)"'
    parser = command_parser("completion", subparsers, description)
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell the script is for")
    parser.set_defaults(func=completion_command)
    return parser


def completion_command(args: argparse.Namespace) -> None:
    """Print the script for a shell."""
    print(SHELLS[args.shell](list(_commands())))


def _commands() -> Iterator[Command]:
    from accelerate.commands.accelerate_cli import COMMANDS, get_parser

    subparsers = next(action for action in get_parser()._actions if action.dest == "command")
    assert isinstance(subparsers.choices, dict)
    for name, parser in subparsers.choices.items():
        flags: dict[tuple[str, ...], Flag] = {}
        words: list[str] = []
        runs_script = False
        parsers = [parser]
        while parsers:
            for action in parsers.pop()._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                if action.option_strings and action.help != argparse.SUPPRESS:
                    names = tuple(shown_spellings(action.option_strings))
                    flags[names] = Flag(names, _help(action), action.nargs != 0, _values(action))
                elif not action.option_strings:
                    words += action.choices or ()
                    runs_script = runs_script or action.nargs == argparse.REMAINDER
        yield Command(name, COMMANDS[name][1], tuple(flags.values()), tuple(words), runs_script)


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices:
        return tuple(map(str, action.choices))
    if action.dest in OPTIONS and OPTIONS[action.dest].choices:
        return tuple(OPTIONS[action.dest].choices)
    return tuple(action.metavar.split("|")) if isinstance(action.metavar, str) and "|" in action.metavar else ()


def _help(action: argparse.Action) -> str:
    return " ".join(((action.help or "") % vars(action)).split())


def _bash(commands: list[Command]) -> str:
    flags, values = [], []
    for command in commands:
        every = " ".join(name for flag in command.flags for name in flag.names)
        valued = " ".join(name for flag in command.flags if flag.takes_value for name in flag.names)
        script = "yes" if command.runs_script else ""
        words = " ".join(command.words)
        flags.append(f"        {command.name}) flags='{every}' valued=' {valued} ' words='{words}' script={script} ;;")
        for flag in command.flags:
            if flag.values:
                cases = "|".join(f"{command.name}:{name}" for name in flag.names)
                values.append(f"        {cases}) flags= words='{' '.join(flag.values)}' valued= ;;")
    return _BASH.format(
        commands=" ".join(command.name for command in commands), flags="\n".join(flags), values="\n".join(values)
    )


_BASH = """\
_accelerate() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local flags= valued= words= script= i
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{commands} --help --version' -- "$word"))
        return
    fi
    case $command in
{flags}
    esac
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [[ $valued == *" ${{COMP_WORDS[i]}} "* ]]; then
            ((i++))
        elif [[ $script && ${{COMP_WORDS[i]}} != -* ]]; then
            return  # what follows a script is the script's own
        fi
    done
    case $command:$before in
{values}
    esac
    if [[ $valued == *" $before "* ]]; then
        return
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    else
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
}}
complete -o default -F _accelerate accelerate"""


def _zsh(commands: list[Command]) -> str:
    described, cases = [], []
    for command in commands:
        described.append(f"        {shlex.quote(f'{command.name}:{command.help}')}")
        specs = [_zsh_spec(name, flag) for flag in command.flags for name in flag.names]
        if command.runs_script:
            specs += ["1:script:_files", "*:argument:_files"]
        else:
            specs.append(f"*:word:({' '.join(command.words)})" if command.words else "*:file:_files")
        # After a script, flags are the script's own.
        start = "_arguments -A '-*'" if command.runs_script else "_arguments"
        arguments = " \\\n            ".join([start, *map(shlex.quote, specs)])
        cases.append(f"        {command.name}) {arguments} ;;")
    return _ZSH.format(described="\n".join(described), cases="\n".join(cases))


def _zsh_spec(name: str, flag: Flag) -> str:
    text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = f":value:({' '.join(flag.values)})" if flag.values else ":value:_files" if flag.takes_value else ""
    return f"{name}[{text}]{value}"


_ZSH = """\
#compdef accelerate
_accelerate() {{
    local state
    local -a commands=(
{described}
    )
    _arguments -C '1:command:->command' '*::argument:->argument'
    case $state in
        command) _describe command commands ;;
        argument) case $words[1] in
{cases}
        esac ;;
    esac
}}
compdef _accelerate accelerate"""


def _fish(commands: list[Command]) -> str:
    lines = ["complete -c accelerate -n __fish_use_subcommand -f"]
    for command in commands:
        start = f"complete -c accelerate -n '__fish_seen_subcommand_from {command.name}'"
        lines.append(
            f"complete -c accelerate -n __fish_use_subcommand -a {command.name} -d {_fish_quoted(command.help)}"
        )
        if command.words:
            lines.append(f"{start} -f -a '{' '.join(command.words)}'")
        for flag in command.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = f" -x -a '{' '.join(flag.values)}'" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"{start} {names} -d {_fish_quoted(flag.help)}{value}")
    return "\n".join(lines)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
