"""torch.save and torch.load: the memory behind a storage, and what `weights_only` takes."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch

# How a pickle asks for the function that makes a tensor of a memory, an offset, a size and strides. Files of all
# releases have it, so torch goes on to read it.
REBUILD_TENSOR = b"ctorch._utils\n_rebuild_tensor\n"


def storage_parts(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype, int, Any]:
    """The memory of a typed storage, its dtype, its length, and the class that stands for it in a file.

    The public methods say that typed storages are going to be removed each time they are called.
    """
    try:
        return storage._untyped_storage, storage.dtype, storage._size(), getattr(torch, storage._pickle_storage_type())
    except AttributeError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = getattr(torch, storage.pickle_storage_type())
            return storage.untyped(), storage.dtype, storage.size(), kind


def try_weights_only(pickled: bytes) -> None:
    """Raise what `torch.load(weights_only=True)` would raise for the pickle of a file, whose tensors are left out.

    Without torch's unpickler nothing is raised: what a file may not have is found when it is loaded, and not before.
    """
    try:
        from torch._weights_only_unpickler import Unpickler
    except ImportError:
        return

    def without_memory(found: tuple[Any, ...]) -> Any:
        _, kind, _, _, length = found
        dtype = getattr(kind, "dtype", torch.uint8)
        return _typed(torch.UntypedStorage(length * dtype.itemsize, device="meta"), dtype)

    unpickler = Unpickler(io.BytesIO(pickled), encoding="utf-8")
    unpickler.persistent_load = without_memory  # type: ignore[method-assign]
    to_check = getattr(torch._utils, "_sparse_tensors_to_validate", [])
    before = len(to_check)
    try:
        unpickler.load()
    finally:
        del to_check[before:]  # which the next `torch.load` would do, and fail of, as these have no values


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """A storage with a dtype, without the warning that such ones are going to be removed."""
    try:
        return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)
    except TypeError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype)


def names_taken() -> set[str] | None:
    """What files may always ask for, by name; None where torch does not tell: then a refused file is not explained."""
    try:
        from torch._weights_only_unpickler import _get_allowed_globals
    except ImportError:
        return None
    return set(_get_allowed_globals())
