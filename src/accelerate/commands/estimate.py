"""`accelerate estimate-memory`: how much memory a model takes, to load it and to train it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.commands.utils import at_least_one, command_parser, run_command
from accelerate.errors import CommandFailed
from accelerate.estimate.models import (
    add_timm_hub_prefix,
    check_has_model,
    create_empty_model,
    library_of,
    timm_model,
    transformers_config,
    verify_on_hub,
)
from accelerate.text import convert_bytes

if TYPE_CHECKING:
    from accelerate.estimate.usage import Usage

__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
]

DESCRIPTION = """Estimate how much memory a model takes: to load it in several formats, and to train it, per rank, under
DDP, FSDP and the stages of DeepSpeed's ZeRO, also with offload to the CPU. Nothing is allocated, and no weights are
downloaded.

The model is one on the Hub (transformers or timm), or a local folder or config file, for which no network is needed."""

# Each format, and how much smaller than in float32 a model is in it.
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate estimate-memory`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    parser = command_parser("estimate-memory", subparsers, DESCRIPTION)
    parser.add_argument("model_name", type=str, help="a model on the Hub, or a local folder or config file")
    parser.add_argument(
        "--library_name", type=str, choices=["timm", "transformers"], default=None, help="if the Hub does not say"
    )
    parser.add_argument(
        "--dtypes",
        type=str,
        nargs="+",
        choices=list(DTYPES),
        default=["float32", "float16", "int8", "int4"],
        help="the formats to show",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the model's own code from the Hub: read it first"
    )
    training = parser.add_argument_group("training", "What the table of training is for.")
    training.add_argument("--batch_size", type=at_least_one, default=1, help="samples per rank; default: 1")
    training.add_argument(
        "--sequence_length", type=at_least_one, default=None, help="tokens per sample; default: at most 512"
    )
    training.add_argument(
        "--num_processes", type=at_least_one, default=None, help="ranks; default: one per device, at least 2"
    )
    training.add_argument("--optimizer", default="adam", choices=["adam", "sgd"], help="default: adam")
    training.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"], help="default: bf16")
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes of each part of a training step with Adam.

    Args:
        bytes: the bytes of the weights in float32.
        mixed_precision: the dtype, such as "float32" or "float16".
        msamp_config: not used; accepted as in the 1.15 release.

    Returns:
        The bytes of "model", "optimizer", "gradients" and "step", all -1 if the dtype cannot be trained in.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16"):
        # Weights stay in float32 beside their half copy, and so do the gradients.
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes * 3 // 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return one row for each dtype: its name, the bytes of the largest layer and of the model, and those of training.

    Args:
        args: the arguments, as the parser of `accelerate estimate-memory` returns them.

    Raises:
        CommandFailed: there is no such model.
    """
    from accelerate.big_modeling.sizes import calculate_maximum_sizes

    try:
        model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    except (RuntimeError, OSError) as error:
        if (library := check_has_model(error)) == "unknown":
            raise
        raise CommandFailed(
            f"{library} has no model {args.model_name}: check its name, or pass --library_name."
        ) from None
    total, (largest, _) = calculate_maximum_sizes(model.float())
    return [
        [dtype, largest / DTYPES[dtype], total / DTYPES[dtype], estimate_training_usage(total, dtype)]
        for dtype in args.dtypes
    ]


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """Format a table with a frame, and its title above it.

    Args:
        headers: the titles of the columns.
        rows: the rows.
        title: the title of the table.
    """
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    # A long title widens the last column.
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
    lines = ["─" * width for width in widths]
    inner = len("│".join(lines))

    def row(words: list[str]) -> str:
        return "│" + "│".join(word.center(width) for word, width in zip(words, widths, strict=True)) + "│"

    return "\n".join(
        [
            "┌" + "─" * inner + "┐",
            "│" + title.center(inner) + "│",
            "├" + "┬".join(lines) + "┤",
            row(cells[0]),
            "├" + "┼".join(lines) + "┤",
            *map(row, cells[1:]),
            "└" + "┴".join(lines) + "┘",
        ]
    )


def estimate_command(args: argparse.Namespace) -> None:
    """Print how much memory loading and training a model take.

    Args:
        args: the arguments, as the parser of `accelerate estimate-memory` returns them.
    """
    rows = [
        [dtype, convert_bytes(layer), convert_bytes(total), _or_none(max(training.values()))]
        for dtype, layer, total, training in gather_data(args)
    ]
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    print(create_ascii_table(headers, rows, f"Memory to load `{args.model_name}`"))
    print(_training_tables(args))


def _or_none(size: int) -> str:
    return "N/A" if size < 0 else convert_bytes(size)


def _training_tables(args: argparse.Namespace) -> str:
    from accelerate import devices
    from accelerate.estimate.usage import usage
    from accelerate.estimate.zero import zero_usage

    choice = devices.choose(os.environ)
    on_cpu = choice.device.name == "cpu"
    processes = args.num_processes or max(2, 1 if on_cpu else choice.device.count())
    task, words = _task(args)
    memory, host = choice.device.memory(0).total, devices.CPU().memory(0).total
    # Ranks on the CPU share its memory, also with what they offload.
    room = memory // processes if on_cpu else memory

    def fits(used: Usage) -> bool:
        return used.device + (used.host if on_cpu else 0) <= room and used.host * processes <= host

    title = f"Memory to train on {processes} ranks, {words}"
    where = "for all ranks together" if on_cpu else f"on each {choice.device.name} device"
    return (
        f"{_usage_table(usage(task, processes), fits, title)}\n"
        f"{_usage_table(zero_usage(task, processes), fits, 'The same with DeepSpeed')}\n"
        "The first table counts the weights of the model without the head that a task adds, and no activations; those "
        "of training count a whole step, with that head if the config names an architecture that has one.\n"
        f"Fits: whether this machine has it, with {convert_bytes(memory)} {where}. Not counted: what the "
        "allocator keeps in reserve and what kernels use for a moment."
    )


def _usage_table(ways: dict[str, Usage], fits: Callable[[Usage], bool], title: str) -> str:
    rows = []
    for name, used in ways.items():
        parts = [used.parameters, used.gradients, used.optimizer, used.at_work, used.activations]
        sizes = [*parts, used.device, used.host]
        rows.append([name, *(convert_bytes(size) if size else "-" for size in sizes), "yes" if fits(used) else "no"])
    headers = ["Per rank", "Parameters", "Gradients", "Optimizer", "At work", "Activations", "Device", "Host", "Fits"]
    return create_ascii_table(headers, rows, title)


def _task(args: argparse.Namespace) -> tuple[Any, str]:
    """What one training step is, and what to say of it."""
    from accelerate.big_modeling import init_empty_weights
    from accelerate.big_modeling.sizes import calculate_maximum_sizes
    from accelerate.estimate import batches
    from accelerate.estimate.usage import OPTIMIZERS, Workload, measure

    if library_of(args.model_name, args.library_name) == "timm":
        step = batches.of_timm(lambda: timm_model(args.model_name), args.batch_size)
    else:
        config = transformers_config(args.model_name, args.trust_remote_code)
        step = batches.of_transformers(config, args.batch_size, args.sequence_length, args.trust_remote_code)
    with init_empty_weights():
        model = step.build().float()
    parameters = list(model.parameters())
    largest = calculate_maximum_sizes(model)[1][0]
    activations, copies = measure(model, step.run, args.mixed_precision)
    task = Workload(
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        largest_layer=int(largest) // 4,
        activations=activations,
        weight_copies=copies,
        state_bytes=OPTIMIZERS[args.optimizer],
        compute_bytes=4 if args.mixed_precision == "no" else 2,
    )
    words = f"{type(model).__name__}, {step.words} each, {args.optimizer}, mixed precision {args.mixed_precision}"
    return task, words


def main() -> None:
    """Run `python -m accelerate.commands.estimate`."""
    run_command(estimate_command_parser())


if __name__ == "__main__":
    main()
