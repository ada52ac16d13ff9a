"""`accelerate to-fsdp2`: a config file for FSDP1 becomes one for FSDP2."""

from __future__ import annotations

import argparse
import enum
import logging
from pathlib import Path
from typing import Any

from accelerate.commands.utils import command_parser, run_command
from accelerate.config import file
from accelerate.config.migrate import migrate

logger = logging.getLogger(__name__)


class ConversionStatus(enum.Enum):
    """Tell why a setting of FSDP1 is left out: FSDP2 may have it one day, or has no use for it."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


# Each key of FSDP1: its name under FSDP2, or why it has none.
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}

# What FSDP1 called a strategy is, to FSDP2, whether weights are gathered again for the backward pass.
_RESHARD = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": _RESHARD,
    "fsdp_reshard_after_forward": _RESHARD,
}

_REASONS = {
    ConversionStatus.REMOVED: "FSDP2 has no such setting",
    ConversionStatus.NOT_YET_IMPLEMENTED: "FSDP2 has no such setting yet",
}


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate to-fsdp2`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    description = "Turn a config file for FSDP1 into one for FSDP2."
    parser = command_parser("to-fsdp2", subparsers, description)
    parser.add_argument("--config_file", type=str, required=True, help="the config file to convert")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--output_file", type=str, default=None, help="the new file; by default the old one")
    parser.set_defaults(func=_from_shell)
    return parser


def load_config(config_file: str) -> dict[str, Any]:
    """Return the contents of a config file.

    Args:
        config_file: its path.
    """
    return file.read(Path(config_file).expanduser())


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the `fsdp_config` section of a config to FSDP2. Settings that are left out are logged.

    Args:
        config: the contents of a config file.

    Returns:
        A new config, or the same if there is nothing to convert.

    Raises:
        ValueError: a setting has a value that FSDP1 does not know.
    """
    section = config.get("fsdp_config") or {}
    if not section:
        logger.info("The config has no section `fsdp_config`: there is nothing to convert.")
        return config
    if str(section.get("fsdp_version", 1)) == "2":
        logger.warning("The config is for FSDP2 already and stays as it is; if it is not, set its fsdp_version to 1.")
        return config
    updated, changes = migrate({"fsdp_config": section})
    for change in changes:
        logger.info(change)
    converted: dict[str, Any] = {}
    for key, value in updated["fsdp_config"].items():
        name = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(name, ConversionStatus):
            logger.warning(f"{key} is left out: {_REASONS[name]}.")
        else:
            converted[name] = _converted(key, value)
            if str(value).upper().startswith("HYBRID_SHARD"):
                logger.warning(
                    f"{key} is {value}: for a copy on each machine, FSDP2 needs parallelism_config_dp_replicate_size "
                    "(machines) and parallelism_config_dp_shard_size (processes on each); add both."
                )
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def _converted(key: str, value: Any) -> Any:
    values = ARGUMENT_VALUE_MAPPING.get(key)
    if values is None or isinstance(value, bool):
        return value
    if str(value).upper() not in values:
        raise ValueError(f"{key} is {value!r}: it should be one of {', '.join(values)}.")
    return values[str(value).upper()]


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a config file to FSDP2.

    Args:
        args: the arguments, as the parser of `accelerate to-fsdp2` returns them.

    Raises:
        FileNotFoundError: there is no such config file.
        FileExistsError: the new file exists, and `--overwrite` is not given.
        ValueError: neither a new file nor `--overwrite` is given.
    """
    if not Path(args.config_file).expanduser().exists():
        raise FileNotFoundError(f"There is no config file {args.config_file}: check its name.")
    if args.output_file is None and not args.overwrite:
        raise ValueError("Name a new file with --output_file, or pass --overwrite to replace the old one.")
    target = Path(args.output_file or args.config_file).expanduser()
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"{target} exists already: name another --output_file, or pass --overwrite.")
    before = load_config(args.config_file)
    after = convert_config_to_fsdp2(before)
    if after is before:
        return  # it was said why
    file.write(after, target)
    print(f"Written to {target}.")


def _from_shell(args: argparse.Namespace) -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    to_fsdp2_command(args)


def main() -> None:
    """Run `python -m accelerate.commands.to_fsdp2`."""
    run_command(to_fsdp2_command_parser())


if __name__ == "__main__":
    main()
