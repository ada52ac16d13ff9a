"""Saving outside of checkpoints: the weights of a model, in one file or several, or any single object."""

from __future__ import annotations

import collections
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.layout import Manifest
from accelerate.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.errors import Unfit, a_kind_of
from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry
from accelerate.io.stored_tensors import each_once, view_of, write_safetensors
from accelerate.io.torch_format import write_torch
from accelerate.state import PartialState
from accelerate.text import convert_file_size_to_int

logger: logging.Logger = logging.getLogger("accelerate.utils.other")  # where the public knows `save`

_FORMAT = {"format": "pt"}


def split(weights: dict[str, Any], limit: int, alone: bool = False) -> list[dict[str, Any]]:
    """Split weights into shards of at most `limit` bytes, in order. Tied tensors stay in one shard.

    alone: each tensor is stored by itself, even if it shares memory with others.
    """
    shards: list[dict[str, Any]] = [{}]
    filled = 0
    home: dict[Any, dict[str, Any]] = {}
    for name, value in weights.items():
        view = None if alone else view_of(value)
        storage = None if view is None else view[:2]
        if storage is not None and storage in home:
            home[storage][name] = value
            continue
        size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += size
        if storage is not None:
            home[storage] = shards[-1]
    return shards


# Gives the values of some of a model's weights, if they are to be kept here. Called on all processes.
Fetch = Callable[[dict[str, Any], bool], dict[str, Any]]


class StreamedWeights:
    """Weights that are fetched file by file, so that only those of one file are in memory at a time."""

    def __init__(self, weights: dict[str, Any], fetch: Fetch, max_shard_size: int | str) -> None:
        self.parts = split(weights, convert_file_size_to_int(max_shard_size))
        self._fetch = fetch
        self._fetched = 0

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        self._fetched += 1
        return self._fetch(part, True)

    def finish(self) -> None:
        """Take part in the remaining fetches, on ranks that write nothing or have failed."""
        for part in self.parts[self._fetched :]:
            self._fetch(part, False)


def save_weights(
    weights: dict[str, Any] | StreamedWeights,
    folder: Path,
    max_shard_size: int | str,
    safe: bool,
) -> None:
    """Write a state dict as `save_model` does. Files are renamed into place when all of them are written."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: pass a folder to save the model to.")
    shards = weights.parts if isinstance(weights, StreamedWeights) else _parts(weights, max_shard_size, safe)
    disk.make_folder(folder)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    if len(shards) == 1:
        names = [SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME]
    else:
        names = [pattern.format(suffix=f"-{i + 1:05d}-of-{len(shards):05d}") for i in range(len(shards))]
    entries: dict[str, FileEntry] = {}
    index = [SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME] * (len(shards) > 1)
    with ExitStack() as stack:
        # In this order, since a stack ends with what it began with: the index gets its name last.
        drafts = {name: stack.enter_context(disk.replacing(folder / name)) for name in (*index, *reversed(names))}
        for name, shard in zip(names, shards, strict=True):
            values = weights(shard) if isinstance(weights, StreamedWeights) else shard
            entries[name] = (write_safetensors if safe else write_torch)(values, drafts[name])
        for name in index:
            entries[name] = _write_index(drafts[name], names, shards)
    _remove_stale(folder, set(entries), pattern)
    disk.sync_folder(folder)
    tell_manifest(folder, entries)


def _parts(weights: dict[str, Any], max_shard_size: int | str, safe: bool) -> list[dict[str, Any]]:
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in weights.values()):
        raise Unfit("This model has parameters on the meta device, which hold no values: load them before saving.")
    return split(each_once(weights) if safe else weights, convert_file_size_to_int(max_shard_size), alone=safe)


def _write_index(path: Path, names: list[str], shards: list[dict[str, Any]]) -> FileEntry:
    stored = {view_of(v) or name: v for shard in shards for name, v in shard.items() if isinstance(v, torch.Tensor)}
    content = {
        "metadata": {"total_size": sum(value.numel() * value.element_size() for value in stored.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)},
    }
    return blocks.write_file(path, [(json.dumps(content, indent=2, sort_keys=True) + "\n").encode()])


def _remove_stale(folder: Path, written: set[str], pattern: str) -> None:
    """Remove the files of an earlier model, which could be mistaken for this one's, and drafts of a killed save."""
    name = re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d{5}-of-\d{5})?") + r"(\.index\.json)?"
    stale = re.compile(rf"{name}|\.{name}\.[\w-]+{re.escape(disk.DRAFT)}")
    for path in folder.iterdir():
        if path.name not in written and stale.fullmatch(path.name):
            disk.remove(path)


def tell_manifest(folder: Path, entries: dict[str, FileEntry]) -> None:
    """Update the manifest of a checkpoint in this folder, in which files were replaced on purpose."""
    manifest = Manifest.read(folder)
    if manifest is None:
        return
    kept = {name: entry for name, entry in manifest.files.items() if (folder / name).exists()}
    changed = {name: entry for name, entry in entries.items() if name in kept}
    if changed or len(kept) != len(manifest.files):
        with disk.replacing(folder / layout.MANIFEST) as draft:
            replace(manifest, files=kept | changed).write(draft)


# --- any object ---------------------------------------------------------------------------------------------------


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object on the main process only. A file appears under its name when it is complete, and not before.

    Args:
        obj: the object.
        f: a path, or a file open for writing.
        save_on_each_node: save on the first process of each machine.
        safe_serialization: write the safetensors format. The object is then a dict of tensors. If it is a
            `state_dict()` in which one tensor has several names, the tensor is stored under the first, with a warning.
    """
    if not isinstance(f, (str, os.PathLike)) and not hasattr(f, "write"):
        raise AttributeError(  # as torch does, with other words
            f"`save` was given {a_kind_of(f)} to write to: pass the object, and then the path or an open file."
        )
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    from safetensors import torch as safetensors

    obj = state.device_kind.storable(obj)
    if safe_serialization and isinstance(obj, collections.OrderedDict):  # what `state_dict()` returns
        obj = clean_state_dict_for_safetensors(obj)
    if not isinstance(f, (str, os.PathLike)):
        f.write(safetensors.save(obj, _FORMAT)) if safe_serialization else torch.save(obj, f)
        return
    target = os.path.realpath(f)
    if not os.path.isdir(os.path.dirname(target)):  # else the error would name a draft
        raise FileNotFoundError(f"There is no folder {os.path.dirname(target)} to save {f} to: create it first.")
    with disk.replacing(target) as path:
        if safe_serialization:
            safetensors.save_file(obj, path, _FORMAT)
        else:
            # Through an open file, because torch would write the passing name of the draft into it.
            with open(path, "wb") as file:
                torch.save(obj, file)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Make a state dict storable as safetensors: tensors are contiguous, share no memory, and have one name each.

    Args:
        state_dict: the state dict, which is not changed.

    Returns:
        A new dict. Names that are left out are logged in a warning.
    """
    cleaned = each_once(state_dict)
    if dropped := sorted(set(state_dict) - set(cleaned)):
        logger.warning(f"Tied tensors are stored once, so these names are left out: {', '.join(dropped)}.")
    storages: set[Any] = set()
    for name, value in cleaned.items():
        if (view := view_of(value)) is not None:
            # Another part of the same memory is other data: it gets a copy of its own.
            plain = (value.clone() if view[:2] in storages else value).resolve_conj().resolve_neg()
            cleaned[name] = plain.contiguous()
            storages.add(view[:2])
    return cleaned
