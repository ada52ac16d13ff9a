"""Writing files of `torch.save` straight from the tensors, without a copy. `safe_load` reads them.

Such a file is a zip archive with a pickle and the storage of each tensor as uncompressed members; `archive_of` lays it
out. Thousands of small tensors would be slow: each is a member, and some forty instructions of the pickle. So the small
tensors of an optimizer share one storage for each dtype, and take nine instructions each, which any `torch.load` reads.
A load gives each its own storage again (see `CheckpointReader.content`). Only plain values, and tensors that share no
storage, are written in this way.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from pathlib import Path
from typing import Any

import torch

from accelerate.errors import CheckpointError
from accelerate.io.blocks import SMALL, FileEntry, Late, Piece, crc32, in_bytes, write_file
from accelerate.io.safe_load import TOGETHER, first_line, named_in, reading
from accelerate.torch_internals.serialization import REBUILD_TENSOR, storage_parts, try_weights_only

_ALIGNMENT = 64
_NO_32_BITS = 0xFFFFFFFF
_LARGEST = 1 << 12  # of a tensor that is put together with others
_FEWEST = 256  # below that it makes no difference

_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}

Members = dict[str, bytes | torch.UntypedStorage]


def write_torch(content: Any, path: Path, *, together: bool = False) -> FileEntry:
    """Write a file for `torch.load`. together: small tensors may share a storage in it (see above)."""
    with naming(path.name):
        archive = archive_of(content, together)
    return archive.write(path)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A context that turns errors of copying or pickling into a CheckpointError that names the file."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} cannot be written, because its state contains something that cannot be pickled "
            f"({type(error).__name__}: {first_line(error)}): have `state_dict` return tensors and plain values."
        ) from error


def archive_of(content: Any, together: bool = False) -> Archive:
    """The archive of `content`, not written yet. together: small tensors may share a storage in it."""
    found = _together(content) if together else None
    pickled, members = _pickled(content) if found is None else found
    archive = Archive()
    archive.add("data.pkl", pickled)
    archive.add("byteorder", sys.byteorder.encode())
    for key, member in members.items():
        archive.add(f"data/{key}", member if isinstance(member, bytes) else _whole(member))
    archive.add("version", b"3\n")
    return archive


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, of which a tensor may use a part."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pickled(content: Any) -> tuple[bytes, Members]:
    """The pickle of `content`, and its members: each storage by its number."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.members


def refused(content: Any) -> str | None:
    """The name of something in this content that a load would refuse, or None."""
    try:
        with reading():
            try_weights_only(_pickled(content)[0])
    except pickle.UnpicklingError as error:
        return named_in(error) or first_line(error)
    except Exception:  # it cannot be tried without its memory, as with some kinds of tensors; or not be written at all
        return None
    return None


class _Pickler(pickle.Pickler):
    """Pickles as torch does: a storage is a member of the archive, and the pickle refers to its number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.members: Members = {}
        self._keys: dict[tuple[str, int, int, torch.dtype], str] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, length, kind = storage_parts(obj)
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, length, kind = obj, torch.uint8, obj.nbytes(), torch.UntypedStorage
        else:
            return None
        # torch refuses the same memory as two dtypes: a member has one. Here each gets a member of its own. What has no
        # address, as on the meta device, is known by the object.
        memory = (str(storage.device), storage.data_ptr() or id(storage), storage.nbytes(), dtype)
        key = self._keys.setdefault(memory, str(len(self._keys)))
        self.members[key] = storage
        # For the CPU, wherever it is: so it can be loaded anywhere.
        return ("storage", kind, key, "cpu", length)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce containers to a call with their content: `weights_only` refuses those that are filled afterwards."""
        if type(obj) is deque:
            return deque, (list(obj), obj.maxlen)
        if type(obj) is defaultdict:
            return defaultdict, (obj.default_factory, dict(obj))
        return NotImplemented


class Archive:
    """Builds an uncompressed zip archive. Members start at multiples of 64 bytes, so that they can be mapped.

    The headers and the directory contain the checksums of the members, which for large ones are known after writing.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece | Late] = []
        self._small = bytearray()  # the end of the pieces: many small ones, each by itself, would take long
        self._size = 0
        # What the directory says of each member, before and after the checksum, and which makes that.
        self._members: list[tuple[bytes, bytes, Callable[[list[int]], int]]] = []

    def pieces(self) -> list[Piece | Late]:
        """The whole file."""
        self._put_small_ones()
        length = len(self._directory([0] * len(self._pieces)))
        return [*self._pieces, Late(length, self._directory)]

    def write(self, path: Path) -> FileEntry:
        return write_file(path, self.pieces())

    def add(self, name: str, content: Piece) -> None:
        path = f"archive/{name}".encode()
        size, start = len(content), self._size
        large = size >= _NO_32_BITS
        extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        padding = -(start + 30 + len(path) + len(extra) + 4) % _ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + bytes(padding)
        short = _NO_32_BITS if large else size
        kind = struct.pack("<HHHHH", 45, 0x800, 0, 0, 0x21)
        sizes = struct.pack("<LL", short, short)
        before, after = b"PK\x03\x04" + kind, sizes + struct.pack("<HH", len(path), len(extra)) + path + extra
        checksum = self._put(before, after, content)
        far = start >= _NO_32_BITS
        long = struct.pack("<QQ", size, size) * large + struct.pack("<Q", start) * far
        long = struct.pack("<HH", 1, len(long)) + long if long else b""
        lengths = struct.pack("<HHHHHLL", len(path), len(long), 0, 0, 0, 0, _NO_32_BITS if far else start)
        self._members.append((b"PK\x01\x02" + struct.pack("<H", 45) + kind, sizes + lengths + path + long, checksum))

    def _put(self, before: bytes, after: bytes, content: Piece) -> Callable[[list[int]], int]:
        """Add a header and a member. Returns a function that finds its checksum, which is inside the header."""
        self._size += len(before) + 4 + len(after) + len(content)
        if isinstance(content, torch.Tensor) and content.device.type == "cpu" and len(content) <= SMALL:
            content = in_bytes(content)
        if isinstance(content, bytes):
            known = crc32(content)
            self._small += before + struct.pack("<L", known) + after + content
            return lambda sums: known
        self._put_small_ones()
        member = len(self._pieces) + 1
        header = Late(len(before) + 4 + len(after), lambda sums: before + struct.pack("<L", sums[member]) + after)
        self._pieces += [header, content]
        return lambda sums: sums[member]

    def _put_small_ones(self) -> None:
        if self._small:
            self._pieces.append(bytes(self._small))
            self._small.clear()

    def _directory(self, sums: list[int]) -> bytes:
        """The central directory. sums: the checksums of the pieces."""
        directory = b"".join(
            before + struct.pack("<L", checksum(sums)) + after for before, after, checksum in self._members
        )
        start, count, length = self._size, len(self._members), len(directory)
        if start >= _NO_32_BITS or count >= 0xFFFF:
            end = start + length
            numbers = struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, start)
            directory += b"PK\x06\x06" + numbers + b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1)
            start, count = min(start, _NO_32_BITS), min(count, 0xFFFF)
        length = min(length, _NO_32_BITS)
        return directory + b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, count, count, length, start, 0)


def _together(content: Any) -> tuple[bytes, Members] | None:
    """The pickle of `content` and its members; None if `_Pickler` should write it."""
    writer = _Writer()
    try:
        writer.put(content, True)
    except (_Unusual, RecursionError):
        return None
    return writer.finished() if writer.small >= _FEWEST else None


class _Unusual(Exception):
    """The content has something that only `_Pickler` can write."""


class _Pool:
    """The shared storage of the small tensors of a dtype. place: the index in the pickle where its size is written."""

    def __init__(self, key: str, place: int) -> None:
        self.key, self.place = key, place
        self.content = bytearray()

    def add(self, content: bytes) -> int:
        """Append bytes. Returns their offset."""
        start = len(self.content)
        self.content += content
        self.content += bytes(-len(content) % _ALIGNMENT)
        return start


class _Writer:
    """Writes a pickle of protocol 2."""

    def __init__(self) -> None:
        self.small = 0
        self._out: list[bytes] = [b"\x80\x02"]
        self._known: dict[Any, bytes] = {}  # how to get again what was written before
        self._containers: set[int] = set()
        self._addresses: set[int] = set()
        self._members: Members = {}
        self._memories: dict[torch.dtype, _Pool] = {}
        # What is before and after the offset of a small tensor, by what it looks like.
        self._frames: dict[Any, tuple[_Pool, int, bytes, bytes]] = {}
        self._ways: dict[type, Callable[[Any, bool], None]] = {
            type(None): lambda value, loose: self._out.append(b"N"),
            bool: lambda value, loose: self._out.append(b"\x88" if value else b"\x89"),
            int: lambda value, loose: self._out.append(_integer(value)),
            float: lambda value, loose: self._out.append(b"G" + struct.pack(">d", value)),
            str: self._text,
            tuple: self._tuple,
            list: self._list,
            dict: self._dict,
            torch.Tensor: self._tensor,
        }

    def put(self, value: Any, loose: bool) -> None:
        """Write a value. loose: whether a load can replace it, since it is in a list or a dict."""
        way = self._ways.get(type(value))
        if way is None:
            raise _Unusual
        way(value, loose)

    def finished(self) -> tuple[bytes, Members]:
        for dtype, memory in self._memories.items():
            self._out[memory.place] = _storage(dtype, memory.key, len(memory.content))
            self._members[memory.key] = bytes(memory.content)
        return b"".join(self._out) + b".", self._members

    def _once(self, mark: int, seen: set[int]) -> None:
        """Refuse what comes twice: that has to stay one object, which `_Pickler` takes care of."""
        if mark in seen:
            raise _Unusual
        seen.add(mark)

    def _again(self, mark: Any, write: Callable[[Any], None]) -> None:
        known = self._known.get(mark)
        if known is not None:
            self._out.append(known)
            return
        write(mark)
        number = len(self._known)
        self._known[mark] = b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)
        self._out.append(b"r" + struct.pack("<I", number))

    def _text(self, value: str, loose: bool) -> None:
        self._again(value, lambda text: self._out.append(_text(text)))

    def _tuple(self, value: tuple[Any, ...], loose: bool) -> None:
        self._out.append(b"(")
        for item in value:
            self.put(item, False)
        self._out.append(b"t")

    def _list(self, value: list[Any], loose: bool) -> None:
        self._once(id(value), self._containers)
        self._out.append(b"](")
        for item in value:
            self.put(item, True)
        self._out.append(b"e")

    def _dict(self, value: dict[Any, Any], loose: bool) -> None:
        self._once(id(value), self._containers)
        self._out.append(b"}(")
        for key, item in value.items():
            self.put(key, False)
            self.put(item, True)
        self._out.append(b"u")

    def _tensor(self, value: torch.Tensor, loose: bool) -> None:
        plain = value.dtype in _STORAGES and value.layout is torch.strided and value.is_cpu
        if not plain or value.requires_grad or value.is_neg() or value.__dict__:
            raise _Unusual
        storage = value.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self._once(address, self._addresses)
        if loose and 0 < size <= _LARGEST and size == value.nbytes and address == value.data_ptr():
            self._add_small(value, string_at(address, size))
            return
        key = str(len(self._members))
        self._members[key] = storage
        self._begin_tensor()
        self._out.append(_storage(value.dtype, key, size) + _integer(int(value.storage_offset())))
        self._end_tensor(value)

    def _add_small(self, value: torch.Tensor, content: bytes) -> None:
        self.small += 1
        look = (value.dtype, value.shape, value.stride())
        frame = self._frames.get(look)
        if frame is not None:
            memory, width, before, after = frame
            self._out.append(before + _integer(memory.add(content) // width) + after)
            return
        self._begin_tensor()
        self._again(value.dtype, self._begin_memory)
        memory = self._memories[value.dtype]
        self._out.append(_integer(memory.add(content) // value.itemsize))
        self._end_tensor(value)
        rebuild, where, shape, stride = (self._known[mark] for mark in (REBUILD_TENSOR, *look))
        self._frames[look] = (memory, value.itemsize, rebuild + b"(" + where, shape + stride + b"tR")

    def _begin_memory(self, dtype: torch.dtype) -> None:
        self._memories[dtype] = _Pool(f"{TOGETHER}{len(self._memories)}", len(self._out))
        self._out.append(b"")

    def _begin_tensor(self) -> None:
        self._again(REBUILD_TENSOR, self._out.append)
        self._out.append(b"(")

    def _end_tensor(self, value: torch.Tensor) -> None:
        for numbers in (value.shape, value.stride()):
            self._again(numbers, self._numbers)
        self._out.append(b"tR")

    def _numbers(self, value: tuple[int, ...]) -> None:
        self._out.append(b"(" + b"".join(map(_integer, value)) + b"t")


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    if length > 255:
        raise _Unusual
    return b"\x8a" + bytes((length,)) + value.to_bytes(length, "little", signed=True)


def _text(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def _storage(dtype: torch.dtype, key: str, size: int) -> bytes:
    """A reference to a storage in the archive. Always for the CPU, so that it can be loaded anywhere."""
    kind = b"ctorch\n" + _STORAGES[dtype].encode() + b"\n"
    return b"(" + _text("storage") + kind + _text(key) + _text("cpu") + _integer(size // dtype.itemsize) + b"tQ"
