"""`accelerate config`: the questions, `config default` and `config update`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from accelerate.commands.config.config import config_command_parser
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import default_command_parser
from accelerate.commands.config.update import update_command_parser
from accelerate.commands.utils import run_command
from accelerate.config import file

__all__ = [
    "config_command_parser",
    "default_command_parser",
    "get_config_parser",
    "load_config_from_file",
    "main",
    "update_command_parser",
]


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate config` and its subcommands.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser = config_command_parser(subparsers)
    more = parser.add_subparsers(
        title="instead of asking", dest="subcommand", metavar="<what>", prog="accelerate config"
    )
    for follows in (default_command_parser(more, [shared]), update_command_parser(more, [shared])):
        # Its default would take the place of a file that was named before the subcommand.
        for action in follows._actions:
            action.default = argparse.SUPPRESS if action.dest == "config_file" else action.default
    return parser


default_config_file: str

if not TYPE_CHECKING:  # names that are not declared above are errors

    def __getattr__(name: str) -> Any:
        # The place depends on the environment, so it is looked up when it is asked for.
        if name == "default_config_file":
            return str(file.default_path())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run `accelerate-config`."""
    run_command(get_config_parser())


if __name__ == "__main__":
    main()
