"""Writing and reading single files."""

from __future__ import annotations

import codecs
import collections
import datetime
import logging
import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from accelerate.state import PartialState

logger = logging.getLogger(__name__)

# What a file may contain beyond tensors and plain values: NumPy's arrays and numbers, the states of its generators, and
# types of Python that hold values and do nothing.
TORCH_SAFE_GLOBALS: list[Any] = [
    *(int, float, bool, str, list, tuple, dict, set, frozenset, range),
    *(collections.Counter, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
    np.array(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    codecs.encode,
    np.dtype,
    *dict.fromkeys(type(np.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"),
]


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Writes an object on the main process, or with `save_on_each_node` on the first process of each machine.

    A file appears under its name when it is complete, and not before. With `safe_serialization`, `obj` is a
    dictionary of tensors and the format is safetensors.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    with replacing(f) as path:
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(obj, path, metadata={"format": "pt"})
        else:
            # Through an open file, because torch would write the passing name of the draft into it.
            with open(path, "wb") as file:
                torch.save(obj, file)


@contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a name beside `target` to write to, and moves it onto `target` when the block has succeeded."""
    path = Path(os.path.realpath(target))
    if path.exists() and not path.is_file():
        # A device or a pipe is written to; it is never replaced.
        yield path
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Reads what `save` wrote with torch; by default only tensors, plain values, and arrays and numbers of NumPy."""
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return torch.load(f, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Makes tensors storable: each contiguous, memory of its own, and the same tensor under one name only."""
    cleaned: dict[str, Any] = {}
    views: dict[tuple[Any, ...], str] = {}
    storages: set[tuple[Any, ...]] = set()
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() == 0:
            cleaned[name] = value
            continue
        storage = (value.device, value.untyped_storage().data_ptr())
        view = (*storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if view in views:
            logger.debug(f"{name} is the same tensor as {views[view]} and is stored once, under that name.")
            continue
        # Another part of the same memory is other data: it gets a copy of its own.
        cleaned[name] = (value.clone() if storage in storages else value).contiguous()
        views[view] = name
        storages.add(storage)
    return cleaned
