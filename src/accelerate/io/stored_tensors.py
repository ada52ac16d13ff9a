"""Tensors in files: where each lies, files of the safetensors format, and which tensors of a state dict are one."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.devices.staging import HostTensor, OpenFiles, Stored
from accelerate.errors import CheckpointError, a_kind_of
from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry
from accelerate.io.disk import open_plain, parsed
from accelerate.io.safe_load import explaining
from accelerate.torch_internals import xla

logger = logging.getLogger(__name__)


class StoredTensor(Stored, Protocol):
    """A tensor that can be read in pieces. path: its file, or empty for a tensor in memory."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def mapped(self) -> torch.Tensor:
        """The tensor on the CPU, without reading it if possible."""


class KeptFile:
    """The bytes of a file as it was when this object was created.

    They stay valid even if the file is deleted or replaced. The file is mapped and not kept open, since thousands of
    weights may each have their own file. Writing to the bytes changes this copy and not the file, so each model has its
    own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            info = os.stat(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, a file of offloaded weights, does not exist: offload the model again."
            ) from error
        self._identity = info.st_dev, info.st_ino  # not given to another file while this one is mapped
        self.bytes: Any = _mapped(path, info.st_size).numpy()

    def open(self) -> int | None:
        """A file descriptor, or None if the path now names another file."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        info = os.fstat(handle)
        if (info.st_dev, info.st_ino) == self._identity:
            return handle
        os.close(handle)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptFile:
        handle = self.open()
        if handle is None:
            return self
        os.close(handle)
        memo[id(self)] = made = KeptFile(self.path)
        return made

    def __reduce__(self) -> Any:
        """Becomes None: another process opens the file by its path."""
        return type(None), ()


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped without a copy; empty if the system cannot map it."""
    with suppress(RuntimeError):
        return _mapped(str(path), path.stat().st_size)
    return _mapped(str(path), 0)


def _mapped(path: str, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(path, size=size, dtype=torch.uint8, device="cpu")


class FileRange(NamedTuple):
    """A tensor stored in a file. file: pins that very file; without it, the path is opened on each read."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: KeptFile | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def kept(self) -> FileRange:
        """The same range, pinned to the file that has the path now."""
        return self._replace(file=KeptFile(self.path))

    def mapped(self) -> torch.Tensor:
        """The tensor as a view of the mapped file: read when touched, never written back."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        raw, offset = (self.file or KeptFile(self.path)).bytes, self.offset
        if offset + self.nbytes > len(raw):
            raise OSError(f"{self.path} is too short to hold its offloaded weight: offload it again.")
        if offset % self.dtype.itemsize:
            raw, offset = raw[offset : offset + self.nbytes].copy(), 0
        return torch.frombuffer(raw, dtype=self.dtype, count=count, offset=offset).view(self.shape)

    def open(self) -> int | None:
        """A file descriptor, or None if the file was unlinked; it can still be read through its mapping."""
        return os.open(self.path, os.O_RDONLY) if self.file is None else self.file.open()

    def read(self, view: memoryview, start: int, files: OpenFiles) -> None:
        """Read its bytes from `start` on into memory."""
        handle = files.open(self)
        if handle is None:  # a file that has lost its name is still mapped
            HostTensor(self.mapped()).read(view, start, files)
        elif not disk.read(handle, [view], self.offset + start):
            raise OSError(f"{self.path} ended while an offloaded weight was being read: offload it again.")


# --- the safetensors format ---------------------------------------------------------------------------------------

# What the format allows a header to have.
LARGEST_HEADER = 100_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    # Of later versions of torch.
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
    "F4": getattr(torch, "float4_e2m1fn_x2", None),
}


def write_safetensors(tensors: dict[str, Any], path: Path) -> FileEntry:
    order, header = header_of(tensors)
    return blocks.write_file(path, blocks.joined([header, *[tensors[name] for name in order]]))


def header_of(tensors: dict[str, Any]) -> tuple[list[str], bytes]:
    """The order of the tensors in the file, and the header bytes. The tensors may be on the meta device."""
    entries = ['{"__metadata__":{"format":"pt"}']
    shapes: dict[torch.Size, str] = {}
    # The widest first, so that each starts at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-_tensor(tensors[name], name).element_size(), name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        kind = _name_of(tensor.dtype)
        if kind is None:
            raise CheckpointError(
                f"{name} has dtype {tensor.dtype}, which safetensors cannot store: save with "
                "`safe_serialization=False`."
            )
        end = offset + tensor.numel() * tensor.element_size()
        shape = shapes.get(tensor.shape)
        if shape is None:
            shapes[tensor.shape] = shape = json.dumps(list(tensor.shape), separators=(",", ":"))
        entries.append(f'{json.dumps(name)}:{{"dtype":"{kind}","shape":{shape},"data_offsets":[{offset},{end}]}}')
        offset = end
    text = (",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


@cache
def _name_of(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype, or None if the installed safetensors cannot read it."""
    from safetensors.torch import save

    try:
        save({"x": torch.empty(0, dtype=dtype)})
    except Exception:
        return None
    return next((name for name, known in _DTYPES.items() if known is dtype), None)


def _tensor(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{name} in the state dict is {a_kind_of(value)}, not a tensor, so safetensors cannot store it: "
            "save with `safe_serialization=False`."
        )
    return value


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU and without a copy."""
    with explaining(path):
        return {name: stored.mapped() for name, stored in SafetensorsFile(path).ranges().items()}


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of the first tensor."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > min(LARGEST_HEADER, size):
            raise ValueError(f"its header should have {length} bytes, but the file has {size}")
        header = parsed(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {a_kind_of(header)}, not a dict")
    if not isinstance(header.get("__metadata__"), (dict, NoneType)):
        raise ValueError(f"its metadata are {a_kind_of(header['__metadata__'])}, not a dict")
    end = 8 + length + _length_of({name: entry for name, entry in header.items() if name != "__metadata__"})
    if end != size:
        raise ValueError(f"it has {size} bytes and should have {end}")
    return header, 8 + length


def _length_of(entries: dict[str, Any]) -> int:
    """The total size of the tensors of a header, which must be stored without gaps."""
    for name, entry in entries.items():
        for numbers in (entry["shape"], entry["data_offsets"]):
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(
                    f"its header gives {name} the numbers {numbers}, which are not all whole numbers of at least 0"
                )
    last = 0
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
        if begin != last:
            raise ValueError(f"its header places {name} at offset {begin}, but the tensors before it end at {last}")
        last = end
    return last


class SafetensorsFile:
    """The table of contents of a safetensors file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = os.fspath(path)
        self._file = KeptFile(self.path)
        try:
            self._entries, self._start = read_header(self.path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path} cannot be read ({reason}): load another checkpoint.") from error
        self.metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)

    def ranges(self) -> dict[str, FileRange]:
        """Where each tensor lies."""
        return {name: self.range_of(name) for name in self._entries}

    def range_of(self, name: str) -> FileRange:
        if name not in self._entries:
            raise KeyError(f"{self.path} has no tensor called {name!r}: offload the model again.")
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has the type {entry['dtype']}, which torch {torch.__version__} does not know")
        shape = tuple(entry["shape"])
        if entry["dtype"] == "F4":  # torch has two of them in one
            shape = (*shape[:-1], shape[-1] // 2)
        begin, end = entry["data_offsets"]
        place = FileRange(self.path, self._start + begin, shape, dtype, self._file)
        if place.nbytes != end - begin or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{self.path} is damaged: its header gives {end - begin} bytes to {name}, which has shape "
                f"{list(shape)} and dtype {dtype}: load another checkpoint."
            )
        return place


# --- tied tensors -------------------------------------------------------------------------------------------------


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
