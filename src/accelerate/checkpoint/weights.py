"""The weights of a model alone: in one file or several, each tensor once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import disk, layout
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.files import read_weights, write_safetensors, write_torch
from accelerate.checkpoint.manifest import Manifest
from accelerate.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.errors import CheckpointError, NotYetSupported
from accelerate.files import clean_state_dict_for_safetensors

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """The bytes of `"10GB"` and its likes (GB: a thousand millions, GiB: 1024 to the third)."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"max_shard_size is {size!r}: give a number of bytes, or a number and a unit as in '5GB'.")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def split(weights: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """Weights in shards of at most `limit` bytes, in their order; a tensor under two names stays in one shard."""
    shards: list[dict[str, Any]] = [{}]
    filled = 0
    home: dict[Any, dict[str, Any]] = {}
    for name, value in weights.items():
        storage = _storage(value)
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


def _storage(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() == 0:
        return None
    return value.device, value.untyped_storage().data_ptr()


def save_weights(weights: dict[str, Any], folder: Path, max_shard_size: int | str, safe: bool) -> None:
    """Write a state dict as `save_model` does. Files get their names when all of them are written."""
    limit = parse_size(max_shard_size)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder to save the model to.")
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in weights.values()):
        raise ValueError("This model has parameters on the meta device, which hold no values: load them before saving.")
    disk.make_folder(folder)
    if safe:
        weights = clean_state_dict_for_safetensors(weights)
    shards = split(weights, limit)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    if len(shards) == 1:
        names = [SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME]
    else:
        names = [pattern.format(suffix=f"-{i + 1:05d}-of-{len(shards):05d}") for i in range(len(shards))]
    entries: dict[str, Entry] = {}
    drafts = {name: folder / f".{name}.draft" for name in names}
    try:
        for name, shard in zip(names, shards, strict=True):
            entries[name] = (write_safetensors if safe else write_torch)(shard, drafts[name])
        if len(shards) > 1:
            index = SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME
            drafts[index] = folder / f".{index}.draft"
            entries[index] = _write_index(drafts[index], names, shards)
        for name, draft in drafts.items():
            disk.rename(draft, folder / name)
    finally:
        for draft in drafts.values():
            disk.remove(draft)
    _remove_stale(folder, set(entries), pattern)
    disk.sync_folder(folder)
    _tell_manifest(folder, entries)


def _write_index(path: Path, names: list[str], shards: list[dict[str, Any]]) -> Entry:
    stored = {_storage(v) or name: v for shard in shards for name, v in shard.items() if isinstance(v, torch.Tensor)}
    content = {
        "metadata": {"total_size": sum(value.numel() * value.element_size() for value in stored.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)},
    }
    output = disk.Output(path)
    try:
        output.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    except BaseException:
        output.abandon()
        raise
    return output.close()


def _remove_stale(folder: Path, written: set[str], pattern: str) -> None:
    """An earlier model in as many files as this one has not would be mixed up with it."""
    shard = re.compile(re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d{5}-of-\d{5})?"))
    index = re.compile(re.escape(pattern).replace(re.escape("{suffix}"), "") + r"\.index\.json")
    for path in folder.iterdir():
        if path.name not in written and (shard.fullmatch(path.name) or index.fullmatch(path.name)):
            disk.remove(path)


def _tell_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    """A model saved into the folder of a checkpoint replaces a file of it, on purpose."""
    manifest = Manifest.read(folder)
    if manifest is None:
        return
    kept = {name: entry for name, entry in manifest.files.items() if (folder / name).exists()}
    changed = {name: entry for name, entry in entries.items() if name in kept}
    if changed or len(kept) != len(manifest.files):
        draft = folder / f".{layout.MANIFEST}.folder"
        disk.make_folder(draft)
        Manifest(kept | changed, manifest.world_size, manifest.strategy, manifest.versions).write(draft)
        disk.rename(draft / layout.MANIFEST, folder / layout.MANIFEST)
        disk.remove_tree(draft)


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that hold the weights at `checkpoint`: a file of weights, an index, or the folder of either."""
    if checkpoint.is_file():
        return _indexed(checkpoint) if checkpoint.name.endswith(".index.json") else [checkpoint]
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (checkpoint / name).is_file():
            return [checkpoint / name]
    indexes = sorted(checkpoint.glob("*.index.json")) if checkpoint.is_dir() else []
    if len(indexes) == 1:
        return _indexed(indexes[0])
    raise ValueError(
        f"{checkpoint} holds no weights ({SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME}) and {len(indexes)} indexes of shards: "
        "give the folder or file that `save_model` wrote."
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}): save the model again.") from error
    return [index.parent / name for name in sorted(set(names))]


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | Any,
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: Any = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Any = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Read the weights that `save_model` wrote into a model, one file after the other.

    checkpoint: the folder, the file of weights, or the index of its shards. dtype: what floating weights are cast to.
    strict: raise where the names are not those of the model. What has to do with a device map is not there yet.
    """
    asked = {"device_map": device_map, "offload_folder": offload_folder, "offload_state_dict": offload_state_dict}
    asked |= {"offload_8bit_bnb": offload_8bit_bnb, "keep_in_fp32_modules": keep_in_fp32_modules}
    for name, value in asked.items():
        if value:
            raise NotYetSupported(f"`{name}` of load_checkpoint_in_model", "leave it out.")
    dtype = getattr(torch, dtype.replace("torch.", "")) if isinstance(dtype, str) else dtype
    unexpected: list[str] = []
    read: set[str] = set()
    known = set(model.state_dict().keys())
    for path in weight_files(Path(checkpoint)):
        weights = read_weights(path)
        if dtype is not None:
            weights = {n: v.to(dtype) if torch.is_floating_point(v) else v for n, v in weights.items()}
        unexpected += sorted(weights.keys() - known)
        read |= weights.keys() & known
        model.load_state_dict(weights, strict=False)
    missing = sorted(known - read - _tied_to(model, read))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{checkpoint} is not of this {type(model).__name__}: it lacks {missing} and has {unexpected} besides; "
            "give the model it was saved from, or strict=False."
        )


def _tied_to(model: torch.nn.Module, names: set[str]) -> set[str]:
    """The names whose tensor is also that of one of `names`."""
    state = model.state_dict()
    stored = {_storage(state[name]) for name in names} - {None}
    return {name for name, value in state.items() if name not in names and _storage(value) in stored}


def with_tied(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under all names that the model has for them, where they were stored under one."""
    state = model.state_dict()
    homes = {_storage(value): name for name, value in state.items() if name in weights}
    missing = {name: homes.get(_storage(value)) for name, value in state.items() if name not in weights}
    tied = {name: weights[home] for name, home in missing.items() if home is not None and _storage(state[name])}
    return {**weights, **tied}
