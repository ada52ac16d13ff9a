"""The `accelerate` command: a table of subcommands, of which only the one that is called is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

from accelerate.commands.utils import CustomArgumentParser, pipe_may_close, run_command
from accelerate.text import did_you_mean

# Name -> the function `f(subparsers=None)` that makes the subcommand's parser, whose default `func` runs it; and one
# line of help. A new command is its file and its line here.
COMMANDS: dict[str, tuple[str, str]] = {
    "config": ("accelerate.commands.config:get_config_parser", "answer questions, and save the answers for `launch`"),
    "launch": ("accelerate.commands.launch:launch_command_parser", "run a script on one process or many"),
    "runs": ("accelerate.commands.runs:runs_command_parser", "list, compare and show runs that were logged here"),
    "env": ("accelerate.commands.env:env_command_parser", "show versions, hardware, config and what was detected"),
    "test": ("accelerate.commands.test:test_command_parser", "check this machine with real processes"),
    "estimate-memory": (
        "accelerate.commands.estimate:estimate_command_parser",
        "estimate the memory a model needs, to load it and to train it",
    ),
    "merge-weights": (
        "accelerate.commands.merge:merge_command_parser",
        "merge the weights of a sharded checkpoint into one file",
    ),
    "to-fsdp2": ("accelerate.commands.to_fsdp2:to_fsdp2_command_parser", "convert a config from FSDP1 to FSDP2"),
    "completion": (
        "accelerate.commands.completion:completion_command_parser",
        "print a completion script for your shell",
    ),
    "tpu-config": ("accelerate.commands.tpu:tpu_command_parser", "run commands on all machines of a TPU pod"),
}


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = CustomArgumentParser(
        prog="accelerate",
        usage="accelerate <command> [<args>]",
        description="Configure, launch and inspect training on one device or many.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="<command>", dest="command", prog="accelerate")
    for place, _ in COMMANDS.values():
        _maker(place)(subparsers)
    return parser


def _maker(place: str) -> Callable[..., argparse.ArgumentParser]:
    module, function = place.split(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    """Run `accelerate`."""
    with pipe_may_close():
        _run(sys.argv[1:])


def _run(words: list[str]) -> None:
    if words[:1] == ["help"]:  # `accelerate help launch` as well
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0 if words else 1)
    if words[0] == "--version":
        print(_version())
        return
    if words[0] not in COMMANDS:
        near = did_you_mean(words[0], COMMANDS)
        sys.exit(f"accelerate: there is no command {words[0]!r}{near}; choose one of {', '.join(COMMANDS)}.")
    run_command(_maker(COMMANDS[words[0]][0])(None), words[1:])


def _version() -> str:
    """What runs, with what, on what; found without importing torch where the device allows it."""
    from importlib import metadata
    from platform import python_version

    from accelerate import __version__
    from accelerate.launch.machine import accelerators

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return f"accelerate {__version__}, no torch, Python {python_version()}"
    found = accelerators()
    device = f"{found.count} x {found.kind}" if found.count else "cpu"
    return f"accelerate {__version__}, {torch}, Python {python_version()}, device: {device}"


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{line}" for name, (_, line) in COMMANDS.items()]
    return (
        "usage: accelerate <command> [<args>]\n\nConfigure, launch and inspect training on one device or many.\n\n"
        + "\n".join(lines)
        + "\n\n`accelerate <command> --help` shows the arguments of a command."
    )


if __name__ == "__main__":
    main()
