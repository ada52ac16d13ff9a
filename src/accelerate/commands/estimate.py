"""`accelerate estimate-memory`: how much memory a model takes, to load it and to train it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from accelerate.commands.utils import CustomArgumentParser, one_sentence
from accelerate.errors import CommandFailed
from accelerate.text import convert_bytes

DESCRIPTION = """Say how much memory a model takes: to load it in several formats, and to train it, per rank, under DDP,
FSDP and FSDP with offload to the CPU. Nothing of it is allocated, and no weights are downloaded.

The model is one of the Hub (transformers or timm), or a local folder or config file, for which no network is needed."""

# Each format, and how much smaller than in float32 a model is in it.
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate estimate-memory`."""
    if subparsers is None:
        parser: argparse.ArgumentParser = CustomArgumentParser("accelerate estimate-memory", description=DESCRIPTION)
    else:
        parser = subparsers.add_parser("estimate-memory", description=DESCRIPTION)
    parser.add_argument("model_name", type=str, help="a model of the Hub, or a folder or config file of this machine")
    parser.add_argument(
        "--library_name", type=str, choices=["timm", "transformers"], default=None, help="where the Hub does not say it"
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
    training.add_argument("--batch_size", type=int, default=1, help="samples per rank; default: 1")
    training.add_argument("--sequence_length", type=int, default=None, help="tokens per sample; default: at most 512")
    training.add_argument("--num_processes", type=int, default=None, help="ranks; default: one per device, at least 2")
    training.add_argument("--optimizer", default="adam", choices=["adam", "sgd"], help="default: adam")
    training.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"], help="default: bf16")
    parser.set_defaults(func=_from_shell)
    return parser


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """What the Hub knows of a model; "gated" for one that needs permission, False for one that is not there."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return False


def check_has_model(error: Exception) -> str:
    """The library that says with an error that it has no such model; "unknown" if it says something else."""
    text = str(error)
    if isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """The name by which timm finds a model of the Hub; timm's own names stay as they are."""
    return f"hf-hub:{model_name}" if "/" in model_name and not model_name.startswith("hf-hub:") else model_name


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """The model without weights, on the `meta` device.

    model_name: of the Hub, or a local folder or config file.
    library_name: "transformers" or "timm"; may be None where the Hub, or the config, says it.
    trust_remote_code: run the model's own code.
    access_token: for models that need one.
    """
    from accelerate.big_modeling import init_empty_weights

    library = _library(model_name, library_name, access_token)
    with init_empty_weights():
        if library == "timm":
            return _timm(model_name)
        from transformers import AutoModel

        config = _transformers_config(model_name, trust_remote_code, access_token)
        return AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _library(model_name: str, library_name: str | None, token: str | None) -> str:
    if library_name is None:
        local = _local_config(model_name)
        if local is not None:
            library_name = "timm" if "pretrained_cfg" in _json(local) else "transformers"
        else:
            library_name = _library_of_hub(model_name, token)
    if library_name not in ("timm", "transformers"):
        raise ValueError(
            f"{model_name} is a model of {library_name!r}: only those of transformers and timm can be built here."
        )
    from accelerate.available import has_package

    if not has_package(library_name):
        raise ValueError(
            f"{model_name} is a model of {library_name}, which is not installed: `pip install {library_name}`."
        )
    return library_name


def _library_of_hub(model_name: str, token: str | None) -> str:
    try:
        info = verify_on_hub(model_name, token)
    except Exception as error:  # whatever the network layer of the day raises
        raise ValueError(
            f"The Hub could not be asked about {model_name} ({type(error).__name__}: {error}): name a local folder or "
            "config file, or pass --library_name to use what was downloaded before."
        ) from None
    if not info:
        raise ValueError(f"There is no model {model_name} on the Hub, and no such folder or file here: check its name.")
    if info == "gated":
        raise ValueError(
            f"{model_name} is only for those who were given access: ask for it on its page, and log in with "
            "`hf auth login`."
        )
    if not getattr(info, "library_name", None):
        raise ValueError(f"The Hub does not say which library {model_name} is for: pass --library_name.")
    return str(info.library_name)


def _local_config(model_name: str) -> Path | None:
    path = Path(model_name).expanduser()
    found = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not found.is_file():
        raise ValueError(f"The folder {path} has no config.json: name the folder of a model, or a config file.")
    if not found.is_file() and (model_name.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ValueError(f"There is no folder or file {model_name} here: check its name.")
    return found if found.is_file() else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): name the config file of a model.") from None


def _transformers_config(model_name: str, trust_remote_code: bool, token: str | None) -> Any:
    from transformers import AutoConfig

    local = _local_config(model_name)
    return AutoConfig.from_pretrained(local or model_name, trust_remote_code=trust_remote_code, token=token)


def _timm(model_name: str) -> Any:
    import timm

    local = Path(model_name).expanduser().is_dir()
    return timm.create_model(f"local-dir:{model_name}" if local else add_timm_hub_prefix(model_name), pretrained=False)


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """The bytes of each part of a training step with Adam, -1 where one cannot train in that format.

    bytes: of the weights in float32. mixed_precision: the format. msamp_config: kept for callers that pass it.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16"):
        # Weights stay in float32 beside their half copy, and so do the gradients.
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes * 3 // 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """A row per format: its name, the bytes of the largest layer and of the model, and those of training."""
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
    """A table in a frame, its title above it."""
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
    """Print both tables."""
    rows = [
        [dtype, convert_bytes(layer), convert_bytes(total), _or_none(max(training.values()))]
        for dtype, layer, total, training in gather_data(args)
    ]
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    print(create_ascii_table(headers, rows, f"Memory to load `{args.model_name}`"))
    print(_training_table(args))


def _or_none(size: int) -> str:
    return "N/A" if size < 0 else convert_bytes(size)


def _training_table(args: argparse.Namespace) -> str:
    from accelerate import devices
    from accelerate.estimate.usage import usage

    choice = devices.choose(os.environ)
    on_cpu = choice.device.name == "cpu"
    processes = args.num_processes or max(2, 1 if on_cpu else choice.device.count())
    task, words = _task(args)
    memory, host = choice.device.memory(0).total, devices.CPU().memory(0).total
    # Ranks on the CPU share its memory, also with what they offload.
    room = memory // processes if on_cpu else memory
    rows = []
    for name, used in usage(task, processes).items():
        fits = used.device + (used.host if on_cpu else 0) <= room and used.host * processes <= host
        sizes = [
            used.parameters,
            used.gradients,
            used.optimizer,
            used.at_work,
            used.activations,
            used.device,
            used.host,
        ]
        rows.append([name, *(convert_bytes(size) if size else "-" for size in sizes), "yes" if fits else "no"])
    headers = [
        "Per rank",
        "Parameters",
        "Gradients",
        "Optimizer",
        "At work",
        "Activations",
        "Device",
        "Host",
        "Fits",
    ]
    table = create_ascii_table(headers, rows, f"Memory to train on {processes} ranks, {words}")
    where = "for all ranks together" if on_cpu else f"on each {choice.device.name} device"
    return (
        f"{table}\nFits: whether this machine has it, with {convert_bytes(memory)} {where}. Not counted: what the "
        "allocator keeps in reserve and what kernels use for a moment."
    )


def _task(args: argparse.Namespace) -> tuple[Any, str]:
    """What one training step is, and what to say of it."""
    from accelerate.big_modeling import init_empty_weights
    from accelerate.big_modeling.sizes import calculate_maximum_sizes
    from accelerate.estimate import batches
    from accelerate.estimate.usage import OPTIMIZERS, Task, measure

    if _library(args.model_name, args.library_name, None) == "timm":
        step = batches.of_timm(lambda: _timm(args.model_name), args.batch_size)
    else:
        config = _transformers_config(args.model_name, args.trust_remote_code, None)
        step = batches.of_transformers(config, args.batch_size, args.sequence_length, args.trust_remote_code)
    with init_empty_weights():
        model = step.build().float()
    parameters = list(model.parameters())
    largest = calculate_maximum_sizes(model)[1][0]
    activations, copies = measure(model, step.run, args.mixed_precision)
    task = Task(
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


def _from_shell(args: argparse.Namespace) -> None:
    with one_sentence("accelerate estimate-memory"):
        estimate_command(args)


def main() -> None:
    """What `python -m accelerate.commands.estimate` does."""
    _from_shell(estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
