"""The pickle of thousands of small tensors that have their memory together: one member of an archive for each dtype.

As torch writes them, each tensor is a member of its own, and some forty instructions of the pickle. That is what takes
the time when there are many, in saving and in loading. Here each is a part of one memory, and nine instructions; any
`torch.load` reads that. Only what the states of optimizers are made of is written in this way: plain values, and
tensors that share nothing. Whoever loads them gives each a memory of its own again (see `Reader.content`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import string_at
from typing import Any

import torch

from accelerate.torch_internals.serialization import REBUILD_TENSOR

NAME = "small"  # how the names of such members begin
_LARGEST = 1 << 12  # of a tensor that is put together with others
_FEWEST = 256  # below that it makes no difference
_ALIGNMENT = 64

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


def pickled(content: Any) -> tuple[bytes, Members] | None:
    """The pickle of `content`, and what it refers to by name; None where it is better written as torch does."""
    writer = _Writer()
    try:
        writer.put(content, True)
    except (_Unusual, RecursionError):
        return None
    return writer.finished() if writer.small >= _FEWEST else None


class _Unusual(Exception):
    """Something that is left to torch's own way."""


class _Pool:
    """The bytes of the small tensors of a dtype. place: where the pickle says how many there are."""

    def __init__(self, key: str, place: int) -> None:
        self.key, self.place = key, place
        self.content = bytearray()

    def add(self, content: bytes) -> int:
        """Returns where it begins."""
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
        """loose: whether another value can be put in its place when it is loaded."""
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
        """What comes twice has to stay one thing, which is left to torch."""
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
        self._again(value, self._new_text)

    def _new_text(self, value: str) -> None:
        self._out.append(_text(value))

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
        self._memories[dtype] = _Pool(f"{NAME}{len(self._memories)}", len(self._out))
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
    """A memory that is a member of the archive. For the CPU, wherever it is: so it can be loaded anywhere."""
    kind = b"ctorch\n" + _STORAGES[dtype].encode() + b"\n"
    return b"(" + _text("storage") + kind + _text(key) + _text("cpu") + _integer(size // dtype.itemsize) + b"tQ"
