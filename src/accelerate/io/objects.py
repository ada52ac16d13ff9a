"""Saving single objects, and finding the tied tensors of a state dict."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Mapping
from typing import IO, Any

import torch

from accelerate.io.disk import replacing
from accelerate.state import PartialState
from accelerate.torch_internals import xla

logger: logging.Logger = logging.getLogger("accelerate.utils.other")  # where the public knows what is in this file

_FORMAT = {"format": "pt"}


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
    with replacing(os.path.realpath(f)) as path:
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
        logger.warning(f"Stored once, because other names are the same tensors: without {', '.join(dropped)}.")
    storages: set[Any] = set()
    for name, value in cleaned.items():
        if (view := view_of(value)) is not None:
            # Another part of the same memory is other data: it gets a copy of its own.
            plain = (value.clone() if view[:2] in storages else value).resolve_conj().resolve_neg()
            cleaned[name] = plain.contiguous()
            storages.add(view[:2])
    return cleaned


def each_once(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which each tied tensor has one name only."""
    owners: dict[int, str] = {}
    names: dict[Any, str] = {}  # of those that share memory, which are few: what they are takes longer to say
    kept: dict[str, Any] = {}
    for name, value in state_dict.items():
        owner = owners.setdefault(address_of(value), name) if _has_memory(value) else name
        if owner != name:
            names.setdefault(view_of(state_dict[owner]), owner)
            owner = names.setdefault(view_of(value), name)
        if owner == name:
            kept[name] = value
        else:
            logger.debug(f"{name} is the same tensor as {owner} and is stored once, under that name.")
    return kept


def address_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors that share memory with this one."""
    return xla.tensor_id(tensor) if tensor.device.type == "xla" else tensor.untyped_storage().data_ptr()


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.numel() > 0


def view_of(value: Any) -> tuple[Any, ...] | None:
    """What identifies a tensor: its storage and how it is viewed. None if it has no memory."""
    if not _has_memory(value):
        return None
    storage = (value.device, address_of(value))
    # A conjugate is other values in the same memory, until they are needed.
    return *storage, value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
