"""Files of `torch.save`, written from wherever the tensors are and read to wherever they go, without a copy between.

torch keeps a pickle and the memory of each tensor as uncompressed members of a zip archive. `archive_of` plans such an
archive. `Opened` has torch read the pickle (with `weights_only`) and only notes where the memory of large tensors is.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate.errors import CheckpointError
from accelerate.io.blocks import SMALL, Entry, Late, Piece, crc32, in_bytes, write_file
from accelerate.io.safe_load import first_line, load, named_in, reading
from accelerate.io.small_tensors import NAME as TOGETHER
from accelerate.io.small_tensors import Members
from accelerate.io.small_tensors import pickled as _together
from accelerate.torch_internals.serialization import storage_parts, try_weights_only

_ALIGNMENT = 64
_LARGE = 1 << 20
_NO_32_BITS = 0xFFFFFFFF


def write_torch(content: Any, path: Path, *, together: bool = False) -> Entry:
    """Write what `torch.load` reads. together: small tensors may become parts of one memory (see `small_tensors`)."""
    with naming(path.name):
        archive = archive_of(content, together)
    return archive.write(path)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What goes wrong with something that cannot be copied or pickled, in one sentence with the file that it is for."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} cannot be written, since it is to hold something that cannot be pickled "
            f"({type(error).__name__}: {first_line(error)}): have `state_dict` return tensors and plain values."
        ) from error


def archive_of(content: Any, together: bool = False) -> Archive:
    """The file of `content`, not yet written. together: small tensors may become parts of one memory."""
    found = _together(content) if together else None
    pickled, members = _each_alone(content) if found is None else found
    archive = Archive()
    archive.add("data.pkl", pickled)
    archive.add("byteorder", sys.byteorder.encode())
    for key, member in members.items():
        archive.add(f"data/{key}", member if isinstance(member, bytes) else _whole(member))
    archive.add("version", b"3\n")
    return archive


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a memory, of which a tensor may be a part."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _each_alone(content: Any) -> tuple[bytes, Members]:
    pickled, storages = _pickled(content)
    return pickled, {str(number): storage for number, storage in enumerate(storages)}


def _pickled(content: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.storages


def refused(content: Any) -> str | None:
    """What in these contents would be refused when they are read, by name; None where all would be taken."""
    try:
        with reading():
            try_weights_only(_pickled(content)[0])
    except pickle.UnpicklingError as error:
        return named_in(error) or first_line(error)
    except Exception:  # it cannot be tried without its memory, as with some kinds of tensors; or not be written at all
        return None
    return None


class _Pickler(pickle.Pickler):
    """Pickles as torch does: the memory of a tensor is a member of the archive, and the pickle has its number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[tuple[str, int, int, torch.dtype], int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, length, kind = storage_parts(obj)
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, length, kind = obj, torch.uint8, obj.nbytes(), torch.UntypedStorage
        else:
            return None
        # torch refuses the same memory as two dtypes: a member has one. Here each gets a member of its own. What has no
        # address, as on the meta device, is known by the object.
        key = (str(storage.device), storage.data_ptr() or id(storage), storage.nbytes(), dtype)
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(storage)
        # For the CPU, wherever it is: so it can be loaded anywhere.
        return ("storage", kind, str(self._numbers[key]), "cpu", length)

    def reducer_override(self, obj: Any) -> Any:
        """Made with all that is in them: what is made empty and then filled is refused by `weights_only`."""
        if type(obj) is deque:
            return deque, (list(obj), obj.maxlen)
        if type(obj) is defaultdict:
            return defaultdict, (obj.default_factory, dict(obj))
        return NotImplemented


class Archive:
    """An uncompressed zip archive in the making. Members start at multiples of 64 bytes, so that they can be mapped.

    Headers and the directory at the end hold the checksums of members: of large ones, when they have been written.
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

    def write(self, path: Path) -> Entry:
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
        """Add a header, which has the checksum in its midst, and a member; returns what finds that."""
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
        """The end of the file. sums: the checksums of the pieces."""
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


class Opened:
    """A file of `torch.save` whose large tensors have memory but no contents yet.

    content: what is in it. places: by the address of each such memory, where in the file its contents are, and itself.
    together: the addresses of memory that tensors share only in the file (see `small_tensors`).
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._file = file
            self.places: dict[int, tuple[int, torch.Tensor]] = {}
            self.together: set[int] = set()
            self._records, self._together = _records(path)
            self._next = self._header = -1
            # Its memory is written to later on, so it stays, also where the file itself has dropped a tensor.
            self._storages: list[Any] = []
            where = self._kept if self._records else "cpu"
            self.content = load(self, map_location=where)  # type: ignore[arg-type]
        del self._file

    def _kept(self, storage: Any, location: str) -> Any:
        self._storages.append(storage)
        return storage

    # What torch asks of a file.

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        at = self._file.tell()
        size, self._next = self._next, self._records.get(at, -1)
        header, self._header = self._header, at
        # torch reads the header of a member, and then all of it into the memory of a tensor.
        if len(buffer) == size and self._next < 0:
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            if header in self._together:
                self.together.add(memory.data_ptr())
            self.places[memory.data_ptr()] = (at, memory)
            self._file.seek(size, os.SEEK_CUR)
            return size
        return self._file.readinto(buffer)


def _records(path: Path) -> tuple[dict[int, int], set[int]]:
    """Where in a file are the headers of members to note, with their sizes; and which are of tensors put together.

    Those are noted that are large, or of tensors put together; none where torch looks at contents.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        pickled = next((member for member in members if member.filename.endswith("/data.pkl")), None)
        # Sparse tensors are looked at by torch when they are made, and others are made for a device that it asks for.
        if pickled is None or re.search(b"sparse|_rebuild_(wrapper|device)", archive.read(pickled)):
            return {}, set()
        # What a machine with another order of bytes has written is turned round when it is read.
        order = next((member for member in members if member.filename.endswith("/byteorder")), None)
        if order is not None and archive.read(order) != sys.byteorder.encode():
            return {}, set()
        stored = [m for m in members if "/data/" in m.filename and m.compress_type == zipfile.ZIP_STORED]
        together = {member.header_offset for member in stored if f"/data/{TOGETHER}" in member.filename}
        noted = [member for member in stored if member.file_size >= _LARGE or member.header_offset in together]
        return {member.header_offset: member.file_size for member in noted}, together
