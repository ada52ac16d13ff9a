"""Merging: the shards of a model, a few weights at a time, into one file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from accelerate.checkpoint import layout
from accelerate.checkpoint.model_weights import split
from accelerate.checkpoint.sharded_state import FolderReader, fill
from accelerate.constants import FSDP_MODEL_NAME
from accelerate.devices.staging import bytes_of
from accelerate.errors import CheckpointError, WrongFolder
from accelerate.io import disk
from accelerate.io.stored_tensors import header_of
from accelerate.io.torch_format import write_torch
from accelerate.state import PartialState

# Tensors are read together up to this size: as few calls as possible, and never the whole model.
GROUP_BYTES = 1 << 28


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Merge the shards of a model that was saved as `SHARDED_STATE_DICT` into one weight file.

    Rank 0 does it, and the other ranks wait: call it on all ranks.

    Args:
        checkpoint_dir: the folder of the shards, such as `pytorch_model_fsdp_0` in a checkpoint, or the checkpoint.
        output_path: the folder for `model.safetensors`. The model is never in memory as a whole.
        safe_serialization: False writes `pytorch_model.bin` instead, which needs memory for the whole model.
        remove_checkpoint_dir: delete the folder of the shards afterwards.
    """
    several = PartialState._shared_state != {} and PartialState().num_processes > 1
    if not several or PartialState().is_main_process:
        source, target = _folder_of_shards(Path(checkpoint_dir)), Path(output_path)
        if target.is_file():
            raise WrongFolder(f"{target} is a file: give the folder in which the weights are to be.")
        disk.make_folder(target)
        with disk.replacing(target / layout.model(0, safe_serialization)) as draft:
            (_write_safetensors if safe_serialization else _write_torch)(FolderReader(source), draft)
        if remove_checkpoint_dir:
            shutil.rmtree(source)
    if several:
        PartialState().wait_for_everyone()


def _folder_of_shards(folder: Path) -> Path:
    if not folder.is_dir():
        raise WrongFolder(f"There is no folder {folder}: correct its name or path.")
    if (folder / ".metadata").is_file():
        return folder
    inside = sorted(path.parent for path in folder.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(path.name for path in inside)
        raise CheckpointError(f"{folder} holds the shards of several models: pass one of its folders {names}.")
    kinds = ("model*.safetensors", "pytorch_model*.bin")
    if whole := sorted(path.name for kind in kinds for path in folder.glob(kind)):
        raise WrongFolder(f"{folder} needs no merging: it already has full weights, in {', '.join(whole)}.")
    raise WrongFolder(
        f"{folder} has no shards of a model (no file `.metadata`): pass a folder that was written with "
        f"SHARDED_STATE_DICT, such as `{FSDP_MODEL_NAME}_0` in a checkpoint."
    )


def _names(metadata: Metadata) -> dict[str, str]:
    """Names in the merged file -> names in the shards, which may all be below one key ("model")."""
    paths = metadata.planner_data or {}
    paths = {key: paths.get(key, (key,)) for key in metadata.state_dict_metadata}
    below_one = len({path[0] for path in paths.values()}) == 1 and all(len(path) > 1 for path in paths.values())
    return {".".join(map(str, path[1:] if below_one else path)): key for key, path in paths.items()}


def _write_safetensors(reader: FolderReader, path: Path) -> None:
    metadata = reader.read_metadata()
    tensors = {
        name: key
        for name, key in _names(metadata).items()
        if isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)
    }
    empty = {name: _empty(metadata, key, "meta") for name, key in tensors.items()}
    order, header = header_of(empty)
    with path.open("wb") as file:
        file.write(header)
        for group in split({name: empty[name] for name in order}, GROUP_BYTES, alone=True):
            part = {tensors[name]: _empty(metadata, tensors[name], "cpu") for name in group}
            fill(part, reader)
            for name in group:
                file.write(bytes_of(part[tensors[name]]).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_torch(reader: FolderReader, path: Path) -> None:
    metadata = reader.read_metadata()
    names = _names(metadata)
    kinds = metadata.state_dict_metadata
    content: dict[str, Any] = {
        key: _empty(metadata, key, "cpu") if isinstance(kinds[key], TensorStorageMetadata) else None for key in kinds
    }
    fill(content, reader)
    write_torch({name: content[key] for name, key in names.items()}, path)


def _empty(metadata: Metadata, key: str, device: str) -> torch.Tensor:
    kind: Any = metadata.state_dict_metadata[key]
    return torch.empty(kind.size, dtype=kind.properties.dtype, device=device)
