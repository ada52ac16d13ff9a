"""One file of weights from a checkpoint in shards (a folder of torch.distributed.checkpoint)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from accelerate.checkpoint import disk, layout
from accelerate.checkpoint.files import safetensors_header, write_torch
from accelerate.checkpoint.shards import FolderReader, fill
from accelerate.checkpoint.stream import flat
from accelerate.constants import FSDP_MODEL_NAME
from accelerate.errors import CheckpointError, WrongFolder
from accelerate.state import PartialState

# Tensors are read together up to this size: as few calls as possible, and never the whole model.
GROUP_BYTES = 1 << 28


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Make one file of the weights of a model that was saved in shards (`SHARDED_STATE_DICT`).

    The first process of a run does it, and the others wait for it: call it on all of them.
    checkpoint_dir: the folder of the shards, as `pytorch_model_fsdp_0` in a checkpoint, or the checkpoint itself.
    output_path: the folder for the file, `model.safetensors`; no more than a part of the model is in memory at a time.
    safe_serialization: False writes `pytorch_model.bin` instead, for which all of the model is in memory.
    remove_checkpoint_dir: delete the folder of the shards afterwards.
    """
    several = PartialState._shared_state != {} and PartialState().num_processes > 1
    if not several or PartialState().is_main_process:
        _merge(_folder_of_shards(Path(checkpoint_dir)), Path(output_path), safe_serialization, remove_checkpoint_dir)
    if several:
        PartialState().wait_for_everyone()


def _merge(source: Path, target: Path, safe: bool, remove: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    path = target / layout.model(0, safe)
    # Under another name until it is whole.
    growing = path.with_name(path.name + ".part")
    (_write_safetensors if safe else _write_torch)(FolderReader(source), growing)
    disk.rename(growing, path)
    if remove:
        shutil.rmtree(source)


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
        raise CheckpointError(f"{folder} holds the shards of several models: name one of its folders {names}.")
    if whole := sorted(path.name for path in folder.glob("model*.safetensors")):
        raise WrongFolder(f"{folder} needs no merging: the weights are there as a whole, in {', '.join(whole)}.")
    raise WrongFolder(
        f"{folder} holds no shards of a model (there is no file `.metadata` in it): name the folder that was written "
        f"with SHARDED_STATE_DICT, as `{FSDP_MODEL_NAME}_0` in a checkpoint."
    )


def _names(metadata: Metadata) -> dict[str, str]:
    """The name of each entry in the merged file -> its name in the shards, which may all be below one key ("model")."""
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
    order, header = safetensors_header(empty)
    with path.open("wb") as file:
        file.write(header)
        for group in _groups(order, empty):
            part = {tensors[name]: _empty(metadata, tensors[name], "cpu") for name in group}
            fill(part, reader)
            for name in group:
                file.write(flat(part[tensors[name]]).numpy().data)
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


def _groups(order: list[str], tensors: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    group: list[str] = []
    filled = 0
    for name in order:
        size = tensors[name].nbytes
        if group and filled + size > GROUP_BYTES:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    if group:
        yield group
