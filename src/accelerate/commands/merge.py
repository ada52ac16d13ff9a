"""`accelerate merge-weights`: one file of weights from a checkpoint in shards."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.utils import command_parser, run_command

DESCRIPTION = """Merge the weights of a model that was saved in shards (SHARDED_STATE_DICT) into one file.

The shards are read a part at a time, so that the model need not fit into memory."""


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate merge-weights`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser("merge-weights", subparsers, DESCRIPTION)
    parser.add_argument("checkpoint_directory", help="the folder of the shards, or the checkpoint that holds it")
    parser.add_argument("output_path", help="the folder for the file")
    parser.add_argument(
        "--unsafe_serialization",
        action="store_true",
        help="write pytorch_model.bin instead of model.safetensors; needs memory for the whole model",
    )
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="delete the shards afterwards")
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the shards of a checkpoint into one weight file.

    Args:
        args: the arguments, as the parser of `accelerate merge-weights` returns them.
    """
    from accelerate.checkpoint.merge import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    print(f"The weights are in {args.output_path}.")


def main() -> None:
    """Run `python -m accelerate.commands.merge`."""
    run_command(merge_command_parser())


if __name__ == "__main__":
    main()
