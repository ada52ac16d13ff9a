"""`accelerate config default`: a config file with what suits this machine, without asking."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.commands.utils import one_sentence
from accelerate.config import file
from accelerate.config.enums import ComputeEnvironment, DistributedType
from accelerate.config.file import ClusterConfig
from accelerate.config.options import option
from accelerate.launch import machine

DESCRIPTION = "Write a config file that suits this machine, without asking."


def write_basic_config(mixed_precision: str = "no", save_location: str | PathLike[str] | None = None) -> Path | bool:
    """Write a config file for all devices of this machine.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: the path of the file. By default that of the default config.

    Returns:
        The path, or False if there is already a file, which stays as it is.

    Example:
        ```python
        write_basic_config(mixed_precision="bf16")
        ```
    """
    path = file.default_path() if save_location is None else Path(save_location).expanduser()
    if path.exists():
        print(f"{path} exists already and is left unchanged: remove it first, or give another path.")
        return False
    precision = option("mixed_precision").check(str(mixed_precision).lower())
    file.write(basic_config(precision).to_dict(), path)
    return path


def basic_config(mixed_precision: str, devices: machine.Accelerators | None = None) -> ClusterConfig:
    """Return a config with one process per device.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        devices: the devices. By default those of this machine.
    """
    devices = machine.accelerators() if devices is None else devices
    # Called as torch calls it: an Apple GPU, or a CPU, is one device.
    several = devices.count > 1
    label = f"MULTI_{'GPU' if devices.kind == 'cuda' else devices.kind.upper()}" if several else "NO"
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType(label),
        mixed_precision=mixed_precision,
        use_cpu=devices.count == 0,
        debug=False,
        num_processes=max(1, devices.count),
    )


def default_command_parser(parser: Any, parents: Sequence[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Build the parser of `accelerate config default`.

    Args:
        parser: the subcommands of `accelerate config`, to which this one is added.
        parents: parsers whose arguments it has as well.
    """
    mine: argparse.ArgumentParser = parser.add_parser(
        "default",
        parents=parents,
        help=DESCRIPTION,
        description=DESCRIPTION,
        formatter_class=SubcommandHelpFormatter,
    )
    mine.add_argument(
        "--config_file",
        metavar="FILE",
        default=str(file.default_path()),
        help="where to write it; default: %(default)s",
    )
    mine.add_argument(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        default="no",
        help="the number format of the forward pass; default: %(default)s",
    )
    mine.set_defaults(func=default_config_command)
    return mine


def default_config_command(args: argparse.Namespace) -> None:
    """Write a config file for this machine without asking, and print its path.

    Args:
        args: the arguments, as the parser of `accelerate config default` returns them.
    """
    with one_sentence("accelerate config default"):
        path = write_basic_config(args.mixed_precision, args.config_file)
    if path:
        print(f"Written to {path}.")
