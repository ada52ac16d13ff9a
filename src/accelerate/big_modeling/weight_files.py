"""The weights of a checkpoint as they lie in its files: names, shapes and places, before any is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accelerate.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate.devices.staging import HostTensor
from accelerate.errors import CheckpointError, Unfit, a_kind_of
from accelerate.io.disk import is_inside, read_json
from accelerate.io.safe_load import explaining, read_torch
from accelerate.io.stored_tensors import FileRange, SafetensorsFile, StoredTensor
from accelerate.text import some_of
from accelerate.torch_internals.modules import metadata_of

logger: logging.Logger = logging.getLogger(__name__)

_FORMATS = ("pt", "mlx")
_OF_OTHERS = ("tf", "flax")  # which keep the axes of a weight in another order


def refuse_swapped(function: str, model: Any) -> None:
    """Raise an error if a function was given something else for the model: most often the checkpoint."""
    if not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, (str, os.PathLike)) else "what was given"  # weights are long
        raise AttributeError(  # as the release does, with other words
            f"`{function}` loads weights into a model, and {given} is {a_kind_of(model)}: pass the model, and then the "
            "checkpoint."
        )


def weight_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a checkpoint: a weight file, the index of a sharded one, or the folder of either."""
    path = Path(checkpoint)
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else [path]
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (path / name).is_file():
            return [path / name]
    if not path.exists():
        raise ValueError(
            f"{checkpoint} does not exist: pass a file of weights, the index of a sharded checkpoint, or a "
            "folder with either."
        )
    indexes = sorted(path.glob("*.index.json"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    raise ValueError(
        f"{checkpoint} has no weights ({SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME}) and {len(indexes)} indexes of shards: "
        "pass a file of weights, the index of a sharded checkpoint, or a folder with either."
    )


def _indexed(index: Path) -> list[Path]:
    try:
        content = read_json(index)
        names = set(content.get("weight_map", content).values())  # some tools write the map and nothing else
        if not names:
            raise ValueError("it names no files")
        if outside := sorted(str(name) for name in names if not is_inside(name)):
            raise ValueError(f"{outside[0]!r} is not in its folder")
        return [index.parent / name for name in sorted(names)]
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"{index} is damaged ({error}): save the model again.") from error


class Contents(NamedTuple):
    """Contents of weight files.

    others: entries that are no such tensors: the extra state of a module, or what is sparse. metadata: what torch has
    noted of modules.
    """

    tensors: dict[str, StoredTensor]
    others: dict[str, Any]
    metadata: dict[str, Any]

    def add(self, more: Contents) -> None:
        for own, added in zip(self, more, strict=True):
            own |= added


def open_weights(path: Path) -> Contents:
    """Return what is in a file, by name, without reading any tensor yet."""
    return Contents(dict(_open_safetensors(path)), {}, {}) if path.suffix == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> dict[str, FileRange]:
    with explaining(path):
        # An absolute path, since it may be kept for as long as the model lives.
        file = SafetensorsFile(path.absolute())
        ranges = file.ranges()
    _check_format(path, file.metadata)
    return ranges


def _check_format(path: Path, metadata: dict[str, str] | None) -> None:
    if metadata is None:
        logger.warning(f"{path} does not say which library its weights are for: torch is assumed.")
    elif metadata.get("format") in _OF_OTHERS:
        raise ValueError(
            f"{path} says that its weights have the format {metadata['format']!r}, but a PyTorch model needs 'pt': "
            "convert them first."
        )
    elif metadata.get("format") not in _FORMATS:
        raise OSError(
            f"{path} says that its weights have the format {metadata.get('format')!r}: save them with "
            "metadata={'format': 'pt'}."
        )


def _open_torch(path: Path) -> Contents:
    try:
        weights = read_torch(path, mmap=True)
    except CheckpointError:
        # Files of the first versions of torch cannot be mapped; another fault shows again.
        weights = read_torch(path)
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path} holds {a_kind_of(weights)} and not a state dict: pass a file of weights.")
    tensors: dict[str, StoredTensor] = {
        name: HostTensor(value.detach().contiguous().resolve_conj().resolve_neg())
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
    others = {name: value for name, value in weights.items() if name not in tensors}
    return Contents(tensors, others, metadata_of(weights))


Shape = tuple[int, ...]


def refuse_shapes(model: nn.Module, checkpoint: Any, shapes: Mapping[str, tuple[Shape, Shape]]) -> None:
    """Raise an error if tensors have other shapes in a checkpoint than in the model. shapes: both, by name."""
    wrong = [
        f"{name} has shape {there} in it and {here} in the model"
        for name, (there, here) in shapes.items()
        if there != here
    ]
    refuse_unfit(model, checkpoint, wrong)


def refuse_unfit(model: nn.Module, checkpoint: Any, wrong: list[str]) -> None:
    """Raise an error if anything in a checkpoint is not as the model has it. wrong: what, one by one."""
    if wrong:
        raise Unfit(
            f"{checkpoint} does not fit this {type(model).__name__} ({'; '.join(wrong)}): give the model that it was "
            "saved from."
        )


def report_names(model: nn.Module, checkpoint: Any, missing: list[str], unexpected: list[str], strict: bool) -> None:
    """Raise an error, or warn, if the names of a checkpoint are not those of the model."""
    if not missing and not unexpected:
        return
    found = " and ".join(
        [f"lacks {some_of(missing)}"] * bool(missing) + [f"has {some_of(unexpected)} besides"] * bool(unexpected)
    )
    if strict:
        raise RuntimeError(
            f"{checkpoint} does not match this {type(model).__name__}: it {found}; give the model it was saved "
            "from, or strict=False."
        )
    logger.warning(f"{checkpoint} {found}: these weights of the {type(model).__name__} are left as they are.")
