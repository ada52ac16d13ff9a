"""Writing and reading single files."""

from __future__ import annotations

import codecs
import collections
import datetime
import logging
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from accelerate import arrays
from accelerate.state import PartialState
from accelerate.torch_internals import xla

logger: logging.Logger = logging.getLogger("accelerate.utils.other")  # where the public knows what is in this file

_FORMAT = {"format": "pt"}

# What a file may contain beyond tensors and plain values: NumPy's arrays and numbers, the states of its generators, and
# types of Python that hold values and do nothing.
TORCH_SAFE_GLOBALS: list[Any] = [
    *(int, float, bool, str, bytes, list, tuple, dict, set, frozenset, range),
    *(collections.Counter, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
    *((np.array(0).__reduce__()[0], name) for name in arrays.NAMES if name.endswith("._reconstruct")),
    *((np.float64(0).__reduce__()[0], name) for name in arrays.NAMES if name.endswith(".scalar")),
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
    dictionary of tensors and the format is safetensors; of the names of one tensor in a `state_dict()` the first one
    is stored, with a warning.
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
    with replacing(f) as path:
        if safe_serialization:
            safetensors.save_file(obj, path, _FORMAT)
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
    with reading():
        before = arrays.count()
        content = torch.load(f, map_location=map_location, **kwargs)
        if arrays.count() == before:
            return content
        return arrays.real(content, {_itself(kind) for kind in torch.serialization.get_safe_globals()})


@contextmanager
def reading() -> Iterator[None]:
    """A context in which files get what is safe, and what the script allows; for NumPy's things see `arrays`."""
    with _reading:  # torch has one list for all threads
        allowed = torch.serialization.get_safe_globals()
        given = [kind for kind in (*allowed, *TORCH_SAFE_GLOBALS) if not _is_of_arrays(kind)]
        given += [(kind, name) for name, kind in arrays.NAMES.items()]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(given)
        try:
            yield
        finally:
            added = set(torch.serialization.get_safe_globals()) - set(given)  # by modules that were imported meanwhile
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([*allowed, *added])


_reading = threading.RLock()


def name_of(kind: Any) -> str:
    """What a file has to ask for to get something that is allowed."""
    return kind[1] if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}"


def _is_of_arrays(kind: Any) -> bool:
    """Whether something has another in its place, or is a class of dtypes, which would make NumPy's own."""
    return name_of(kind) in arrays.NAMES or isinstance(_itself(kind), type(np.dtype))


def _itself(kind: Any) -> Any:
    return kind[0] if isinstance(kind, tuple) else kind


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Makes tensors storable: each contiguous, memory of its own, and the same tensor under one name only."""
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
    """The same tensor under one name only."""
    names: dict[Any, str] = {}
    kept: dict[str, Any] = {}
    for name, value in state_dict.items():
        view = view_of(value)
        if view is None or names.setdefault(view, name) == name:
            kept[name] = value
        else:
            logger.debug(f"{name} is the same tensor as {names[view]} and is stored once, under that name.")
    return kept


def address_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors that share memory with this one."""
    return xla.tensor_id(tensor) if tensor.device.type == "xla" else tensor.untyped_storage().data_ptr()


def view_of(value: Any) -> tuple[Any, ...] | None:
    """Which memory a tensor is of, and as what it is seen: the same for two names of one; None where it has none."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() == 0:
        return None
    storage = (value.device, address_of(value))
    # A conjugate is other values in the same memory, until they are needed.
    return *storage, value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
