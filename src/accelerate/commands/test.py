"""`accelerate test`: check this machine with real processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate.commands.utils import command_parser, run_command
from accelerate.launch.plan import OWN_PYTHON

DESCRIPTION = """Launch a script that checks this machine, set up as the config file says: processes, collectives, data,
training with accumulation, random states, checkpoints, mixed precision. Include the last line in a bug report."""

SCRIPT = Path(__file__).parents[1] / "test_utils" / "scripts" / "test_script.py"


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate test`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser("test", subparsers, DESCRIPTION)
    parser.add_argument("--config_file", default=None, help="the config file; default: the file that `launch` reads")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Launch the checks of this package. If one fails, exit with its code.

    Args:
        args: the arguments, as the parser of `accelerate test` returns them.
    """
    command = [*OWN_PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if args.config_file is not None:
        if not Path(args.config_file).expanduser().is_file():
            sys.exit(
                f"accelerate test: There is no config file {args.config_file}: give another one with `--config_file`, "
                "or make one with `accelerate config`."
            )
        command += ["--config_file", args.config_file]
    code = subprocess.run([*command, str(SCRIPT)]).returncode
    if code != 0:
        sys.exit(code)


# pytest would take them for tests wherever they are imported.
test_command.__test__ = test_command_parser.__test__ = False  # type: ignore[attr-defined]


def main() -> None:
    """Run `python -m accelerate.commands.test`."""
    run_command(test_command_parser())


if __name__ == "__main__":
    main()
