"""`accelerate config`: ask, show, write."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from accelerate.commands.utils import command_parser, one_sentence, run_command
from accelerate.config import file
from accelerate.config.enums import ComputeEnvironment
from accelerate.config.file import BaseConfig
from accelerate.config.options.launching import TPU

DESCRIPTION = "Answer questions about the machine and the training; `accelerate launch` uses the answers from then on."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate config`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser("config", subparsers, DESCRIPTION)
    parser.add_argument(
        "--config_file",
        metavar="FILE",
        help="the file for the answers (.yaml or .json); default: the file that `launch` reads",
    )
    parser.set_defaults(func=config_command)
    return parser


def get_user_input() -> BaseConfig:
    """Ask all questions of `accelerate config`.

    Returns:
        The config.
    """
    from accelerate.commands.config import cluster, questions, sagemaker

    where = questions.choose(
        "Where will the training run?",
        {
            "LOCAL_MACHINE": "this machine, or machines like it",
            "AMAZON_SAGEMAKER": "a job on Amazon SageMaker (not part of this version)",
        },
        "LOCAL_MACHINE",
    )
    return sagemaker.get_sagemaker_input() if where == "AMAZON_SAGEMAKER" else cluster.get_cluster_input()


def config_command(args: argparse.Namespace) -> None:
    """Ask for the settings, show them, and write them to the config file.

    Args:
        args: the arguments, as the parser of `accelerate config` returns them.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.exit(
            "accelerate config: the questions need a terminal, and there is none here: `accelerate config default` "
            "writes a file that suits this machine."
        )
    from accelerate.commands.config import questions

    path = Path(args.config_file).expanduser() if args.config_file else file.default_path()
    with one_sentence("accelerate config"):
        if path.exists():
            _start_from(path)
        try:
            print("Esc goes back to the previous question.")
            config = questions.with_steps_back(get_user_input)
        except (KeyboardInterrupt, EOFError):
            print("Nothing was written.", file=sys.stderr)
            sys.exit(130)
        _summary(config)
        file.write(config.to_dict(), path)
    print(f"Written to {path}.")
    _what_now(config, path)


def _say(sentence: str) -> None:
    """In lines as wide as the terminal, which would break them in the middle of a word."""
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False))


def _start_from(path: Path) -> None:
    """Have the answers of a file that is there suggested."""
    from accelerate.commands.config import questions
    from accelerate.config.options import OPTIONS

    _say(f"{path} exists: its answers are the suggestions, and it is replaced at the end; Ctrl-C leaves it unchanged.")
    try:
        content = file.load_config_from_file(path).to_dict()
    except ValueError as problem:
        _say(f"It cannot be read, so none of its answers are suggested: {problem}")
        return
    sections = [value for value in content.values() if isinstance(value, dict)]
    found = {key: value for section in (content, *sections) for key, value in section.items()}
    questions.earlier.update(distributed_type=found.get("distributed_type"))
    for name, each in OPTIONS.items():
        if each.file_key in found:
            questions.earlier[name] = found[each.file_key]


def _what_now(config: BaseConfig, path: Path) -> None:
    if config.compute_environment != ComputeEnvironment.LOCAL_MACHINE:
        job = "A job on Amazon SageMaker"
        _say(f"{job} is not part of this version, so `accelerate launch` can only show it, with `--dry_run`.")
        return
    flag = "" if path == file.default_path() else f" --config_file {shlex.quote(str(path))}"
    print(f"`accelerate launch{flag}` uses it.\n`accelerate test{flag}` tries it out.")  # whole, to be copied


def _summary(config: BaseConfig) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", box=SIMPLE, title="Your answers", title_justify="left")
    others = (
        set() if getattr(config.distributed_type, "value", "") == "XLA" else {each.file_key for each in TPU.options}
    )
    for key, value in config.to_dict().items():
        if key in others:  # which are in every file
            continue
        for name, inner in value.items() if isinstance(value, dict) else [(key, value)]:
            table.add_row(Text(str(name)), Text(str(inner)))
    Console(highlight=False).print(table)


def main() -> None:
    """Run `python -m accelerate.commands.config.config`."""
    run_command(config_command_parser())


if __name__ == "__main__":
    main()
