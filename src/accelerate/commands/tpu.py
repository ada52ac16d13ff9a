"""`accelerate tpu-config`: run commands on all machines of a TPU pod, through `gcloud`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path
from typing import Any

from accelerate import __version__
from accelerate.commands.utils import command_parser, run_command
from accelerate.config import file as config_file
from accelerate.errors import CommandFailed

DESCRIPTION = "Run commands on all machines of a TPU pod, to prepare them for `accelerate launch`."


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate tpu-config`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser("tpu-config", subparsers, DESCRIPTION)
    pod = parser.add_argument_group("Config Arguments", "Which pod; by default the one of the config file.")
    pod.add_argument("--config_file", type=str, default=None, help="the config file")
    pod.add_argument("--tpu_name", default=None, help="the name of the pod")
    pod.add_argument("--tpu_zone", default=None, help="its zone")
    work = parser.add_argument_group("TPU Arguments", "What to run there.")
    work.add_argument("--use_alpha", action="store_true", help="use `gcloud alpha` instead of `gcloud`")
    work.add_argument("--command_file", default=None, help="a file with a command per line")
    work.add_argument("--command", action="append", nargs="+", help="a command; may be given several times")
    work.add_argument("--install_accelerate", action="store_true", help="install accelerate there first, from PyPI")
    work.add_argument(
        "--accelerate_version", default="latest", help="its version: a number, `latest` (the default) or `dev`"
    )
    work.add_argument("--debug", action="store_true", help="print the command instead of running it")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run a command on all workers of a TPU pod, or print it.

    Args:
        args: the arguments, as the parser of `accelerate tpu-config` returns them.
    """
    command = _gcloud(args)
    if args.debug:
        print(f"Not run, because of --debug: {' '.join(command)}\nTo paste: {shlex.join(command)}")
        return
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError:
        raise FileNotFoundError(
            "`gcloud` is not installed here: install the Google Cloud command line first."
        ) from None
    if code != 0:
        raise CommandFailed(f"`{shlex.join(command)}` ended with code {code}; what it printed above says why.")
    print("The commands have run on all machines of the pod.")


def _gcloud(args: argparse.Namespace) -> list[str]:
    name, zone, commands = args.tpu_name, args.tpu_zone, _commands(args)
    if args.config_file is not None or config_file.default_path().is_file():
        defaults: Any = config_file.load_config_from_file(args.config_file)
        name, zone = name or getattr(defaults, "tpu_name", None), zone or getattr(defaults, "tpu_zone", None)
        if not commands:
            commands = _lines(getattr(defaults, "command_file", None)) or getattr(defaults, "commands", None) or []
    if not name or not zone:
        raise ValueError("Which pod? Pass --tpu_name and --tpu_zone, or set them in the config file.")
    if not commands:
        raise ValueError("There is nothing to run: pass --command or --command_file, or set one in the config file.")
    steps = ["cd /usr/share", *_install(args), *commands]
    gcloud = ["gcloud", "alpha"] if args.use_alpha else ["gcloud"]
    where = ["compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone]
    return [*gcloud, *where, "--command", "; ".join(steps), "--worker", "all"]


def _commands(args: argparse.Namespace) -> list[str]:
    if args.command_file is not None:
        return _lines(args.command_file)
    # `--command echo --command ls` and `--command "echo a" "ls"` are both lists of commands
    return [part for words in args.command or [] for part in ([words] if isinstance(words, str) else words)]


def _lines(path: str | None) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if line.strip()] if path else []


def _install(args: argparse.Namespace) -> list[str]:
    if not args.install_accelerate:
        return []
    known = {"latest": f'-U "accelerate>={__version__}"', "dev": "git+https://github.com/huggingface/accelerate.git"}
    return [f"pip install {known.get(args.accelerate_version, f'accelerate=={args.accelerate_version}')}"]


def main() -> None:
    """Run `python -m accelerate.commands.tpu`."""
    run_command(tpu_command_parser())


if __name__ == "__main__":
    main()
