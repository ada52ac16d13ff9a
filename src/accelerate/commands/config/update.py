"""`accelerate config update`: bring a config file of an earlier release up to date."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.commands.utils import one_sentence
from accelerate.config import file
from accelerate.config.migrate import migrate

DESCRIPTION = "Bring a config file up to date: rename keys that have a new name, and add new ones with their defaults."


def update_config(args: argparse.Namespace) -> str:
    """Bring a config file up to date.

    Args:
        args: the arguments, as the parser of `accelerate config update` returns them.

    Returns:
        Its path.

    Raises:
        ValueError: there is no such file.
    """
    path = _path(args)
    if not path.is_file():
        raise ValueError(f"There is no config file {path} to update: give the path of one with `--config_file`.")
    file.write(file.load_config_from_file(path).to_dict(), path)
    return str(path)


def update_command_parser(parser: Any, parents: Sequence[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Build the parser of `accelerate config update`.

    Args:
        parser: the subcommands of `accelerate config`, to which this one is added.
        parents: parsers whose arguments it has as well.
    """
    mine: argparse.ArgumentParser = parser.add_parser(
        "update",
        parents=parents,
        help=DESCRIPTION,
        description=DESCRIPTION,
        formatter_class=SubcommandHelpFormatter,
    )
    mine.add_argument("--config_file", metavar="FILE", help="the file; default: the one `launch` reads")
    mine.set_defaults(func=update_config_command)
    return mine


def update_config_command(args: argparse.Namespace) -> None:
    """Bring a config file up to date, and print what has changed in it.

    Args:
        args: the arguments, as the parser of `accelerate config update` returns them.
    """
    with one_sentence("accelerate config update"):
        path = _path(args)
        changes = migrate(file.read(path))[1] if path.is_file() else []
        update_config(args)
    for change in changes:
        print(f"  {change}")
    print(f"{path} is up to date.")


def _path(args: argparse.Namespace) -> Path:
    return Path(args.config_file).expanduser() if args.config_file else file.default_path()
