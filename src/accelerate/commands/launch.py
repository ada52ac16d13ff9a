"""`accelerate launch`: run a script on one process or many."""

from __future__ import annotations

import argparse
import glob
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate.available import has_package, lacks_fp8_package
from accelerate.commands.utils import CustomArgumentParser, HelpFormatter, command_parser, run_command
from accelerate.config.options import FAMILIES, FLAG, Option
from accelerate.config.options.base import WORDS
from accelerate.errors import NotInstalled, NotYetSupported
from accelerate.text import did_you_mean

if TYPE_CHECKING:
    # What help and a wrong flag do not need is imported when something is launched.
    from accelerate.launch.plan import LaunchPlan
    from accelerate.launch.settings import Settings

# What torchrun and others call some of the flags.
ELSEWHERE = {
    "-n": "`--num_processes`",
    "--bf16": "`--mixed_precision bf16`",
    "--fp16": "`--mixed_precision fp16`",
    "--nproc_per_node": "`--num_processes`, of all machines together",
    "--node_rank": "`--machine_rank`",
    "--master_addr": "`--main_process_ip`",
    "--master_port": "`--main_process_port`",
}
DESCRIPTION = """Run a script on one process or many, on one machine or many.

Flags come before the script; everything after it is passed to the script. A setting is taken from its flag, else from
the config file (`accelerate config` writes one), else from the machine. `--dry_run` shows what would happen."""


def clean_option(option: str) -> str:
    """Return a flag with `_` between its words.

    Args:
        option: the flag. Anything else is returned as it is.
    """
    return "--" + option[2:].replace("-", "_") if option.startswith("--") else option


class CustomHelpFormatter(HelpFormatter):
    """Format help without engines that this version lacks, and without the others once the command line names one.

    Args:
        *args: positional arguments of an argparse formatter.
        **kwargs: keyword arguments of an argparse formatter.

    Example:
        ```bash
        accelerate launch --use_fsdp --help
        ```
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        words = {clean_option(word) for word in sys.argv[1:]}
        named = {family.title for family in FAMILIES if family.switch and f"--{family.switch}" in words}
        self._left_out = {
            family.title
            for family in FAMILIES
            if family.title not in named and (family.absent or (named and family.switch))
        }

    def add_argument(self, action: argparse.Action) -> None:
        if self._heading() not in self._left_out:
            super().add_argument(action)

    def end_section(self) -> None:
        if self._heading() in self._left_out:
            self._current_section.items.clear()
        super().end_section()

    def _heading(self) -> str | None:
        return self._current_section.heading


class _Parser(CustomArgumentParser):
    """Leave everything after the script as it is, including a `--`, which argparse would interpret."""

    STAND_IN = "\0--"
    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [self.STAND_IN if word == "--" else word for word in (sys.argv[1:] if args is None else args)]
        self._words = words
        found, rest = super().parse_known_args(words, namespace)
        after = [found.training_script, *found.training_script_args]
        after = after[1:] if after[0] == self.STAND_IN else after  # `launch --cpu -- script`
        if not after:
            self.error("name the script to run")
        found.training_script, *found.training_script_args = ("--" if word == self.STAND_IN else word for word in after)
        return found, rest

    def _instead_of(self, word: str) -> str:
        here = ELSEWHERE.get(clean_option(word))
        return f" (here it is {here})" if here else super()._instead_of(word)

    def error(self, message: str) -> NoReturn:
        missing = message.startswith("the following arguments are required: script")
        flags = [word for word in self._words if word.startswith("--")] if missing else []
        if unknown := [flag for flag in flags if flag.partition("=")[0] not in self._option_string_actions]:
            self._refuse(unknown)
        super().error("name the script to run" if missing else message)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate launch`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser(
        "launch",
        subparsers,
        DESCRIPTION,
        _Parser,
        allow_abbrev=False,
        formatter_class=CustomHelpFormatter,
        usage="accelerate launch [flags] script [arguments of the script]",
        epilog=f"Not shown, because this version does not support them: the flags of {_absent()}.",
    )
    for family in FAMILIES:
        group = parser.add_argument_group(family.title, family.help)
        for option in family.options:
            _add(group, option)
    parser.add_argument("training_script", metavar="script", help="the script, module or program to run")
    parser.add_argument("training_script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(func=_from_shell)
    return parser


def _absent() -> str:
    *titles, last = [family.title for family in FAMILIES if family.absent]
    return f"{', '.join(titles)} and {last}" if titles else last


def _add(group: Any, option: Option) -> None:
    settings: dict[str, Any] = {"dest": option.name, "default": option.default, "help": option.help.replace("%", "%%")}
    if option.kind is FLAG:
        group.add_argument(*option.spellings, action="store_true", **settings)
        if option.negative:
            group.add_argument(option.negative, action="store_false", **{**settings, "help": "do not"})
        return
    if option.kind is WORDS:
        group.add_argument(*option.spellings, action="append", metavar="TEXT", **settings)
        return
    shown = {**settings, "help": settings["help"] + _default_in_words(option)}
    metavar = "|".join(option.choices) if 0 < len(option.choices) < 6 else option.kind.placeholder
    group.add_argument(*option.spellings, type=_reader(option), metavar=metavar, **shown)


def _default_in_words(option: Option) -> str:
    many = f" ({', '.join(option.offered)})"
    many = many if len(option.choices) >= 6 else ""
    return many + (f"; default: {option.kind.shown(option.default)}" if option.default not in (None, "") else "")


def _reader(option: Option) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return option.read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def launch_command(args: argparse.Namespace) -> None:
    """Launch a script as parsed arguments say, and return when the run has ended.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.

    Raises:
        subprocess.CalledProcessError: the run failed.

    Example:
        ```python
        launch_command(launch_command_parser().parse_args(["--num_processes", "2", "train.py"]))
        ```
    """
    from accelerate.launch.run import run

    planned = _planned(args)
    if planned is not None:
        run(planned)


def _from_shell(args: argparse.Namespace) -> None:
    from accelerate.launch.run import run_from_shell

    planned = _planned(args)
    if planned is not None:
        run_from_shell(planned)


def _planned(args: argparse.Namespace) -> LaunchPlan | None:
    """Return the plan to carry out, or None if it was only to be shown."""
    from accelerate.launch.plan import plan
    from accelerate.launch.resolve import resolve

    settings = resolve(args)
    planned = plan(settings)
    if settings.dry_run:
        from accelerate.launch.show import show

        for check in (_check_megatron, _check_script):
            try:
                check(settings)
            except (OSError, ValueError, NotInstalled) as problem:
                settings.notes.append(str(problem))
        show(planned, settings)
        return None
    _ready(planned, settings)
    return planned


def _ready(planned: LaunchPlan, settings: Settings) -> None:
    """Refuse what cannot be run here, and print what the user should know."""
    if planned.refused is not None:
        raise NotYetSupported(*planned.refused)
    if planned.missing:
        raise NotInstalled(planned.missing)
    if settings.mixed_precision == "fp8" and (missing := lacks_fp8_package(settings.fp8_backend)):
        raise NotInstalled(missing)
    _check_megatron(settings)
    _check_script(settings)
    if not settings.quiet:
        for line in [*settings.notes, *planned.notes]:
            print(f"accelerate: {line}", file=sys.stderr, flush=True)


def _check_megatron(settings: Settings) -> None:
    """Refuses Megatron-LM where it is not installed, and parts of a model that the processes do not fit."""
    if not settings.use_megatron_lm:
        return
    if not has_package("megatron.core"):
        raise NotInstalled("`--use_megatron_lm` needs Megatron-LM: pip install megatron-core")
    tensors, stages = int(settings.megatron_lm_tp_degree or 1), int(settings.megatron_lm_pp_degree or 1)
    processes = int(settings.num_processes or 1)
    if processes % (tensors * stages) != 0:
        raise ValueError(
            f"`--megatron_lm_tp_degree {tensors}` and `--megatron_lm_pp_degree {stages}` take a multiple of "
            f"{tensors * stages} processes, but there are {processes}: set `--num_processes`, or make the degrees "
            "smaller."
        )


def _check_script(settings: Settings) -> None:
    """Refuse a script or module of this machine that does not exist."""
    script, program = settings.script, settings.no_python
    if settings.mpirun_hostfile is not None or settings.tpu_use_cluster:
        return
    if settings.module:
        from accelerate.launch.module import why_not

        if problem := why_not(script):
            raise FileNotFoundError(problem)
        return
    if program and shutil.which(script) is not None:
        return
    if os.path.isdir(script) and not program and not os.path.exists(os.path.join(script, "__main__.py")):
        raise IsADirectoryError(f"{script} is a folder without a `__main__.py`: name the script to run.")
    if not os.path.exists(script):
        what, remedy = "program" if program else "script", "correct its name or path"
        if not program and re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(script)):
            remedy = "leave it out, for scripts are run by Python anyway, and name the script"
        near = "" if program else did_you_mean(script, glob.glob(os.path.join(os.path.dirname(script), "*.py")))
        raise FileNotFoundError(f"There is no {what} {script}{near} (in {os.getcwd()}): {remedy}.")
    if not program and os.path.splitext(script)[1] in (".yaml", ".yml", ".json"):
        raise ValueError(f"{script} is no Python script: for a config file, write `--config_file {script}` before it.")
    if program and os.access(script, os.X_OK) and not os.path.isdir(script):
        raise FileNotFoundError(
            f"There is no program {script} on the PATH: for the one in this folder write ./{script}."
        )
    if program:
        raise PermissionError(f"{script!r} is not executable: make it so with `chmod +x`, or leave out `--no_python`.")


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Return all settings as a namespace, the config file, and whether the mixed precision came from it."""
    from accelerate.launch.resolve import resolve

    settings = resolve(args)
    return settings.namespace(), settings.file, settings.of["mixed_precision"].source == "file"


def _run_on(engine: str, args: argparse.Namespace) -> None:
    from accelerate.launch.resolve import resolve
    from accelerate.launch.run import run

    settings = resolve(args)
    planned = importlib.import_module(f"accelerate.launch.engines.{engine}").ENGINE.plan(settings)
    _ready(planned, settings)
    run(planned)


def simple_launcher(args: argparse.Namespace) -> None:
    """Run a script in one process.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("single", args)


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run a script in several processes with torch elastic.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("elastic", args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run a script with DeepSpeed.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("deepspeed", args)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Run a script on a TPU.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("tpu", args)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Run a script on a TPU pod.

    Args:
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("tpu", args)


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Run a script on Amazon SageMaker.

    Args:
        sagemaker_config: not used, since the config file has these settings; accepted as in the 1.15 release.
        args: the arguments, as the parser of `accelerate launch` returns them.
    """
    _run_on("sagemaker", args)


def main() -> None:
    """Run `accelerate-launch`."""
    run_command(launch_command_parser())


if __name__ == "__main__":
    main()
