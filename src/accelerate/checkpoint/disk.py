"""What a checkpoint does to the disk, one small step each, so that each can be made to fail in a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Checksums are of blocks, so that several threads can take them.
BLOCK = 1 << 24
_THREADS = min(8, os.cpu_count() or 1)


class Entry(NamedTuple):
    """What a manifest says of a file: its size, and the checksum of each of its blocks."""

    size: int
    crc32: list[int]


class Output:
    """A new file that is counted and summed up while it is written, and on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115  (closed by close or abandon)
        self._size = 0
        self._sums: list[int] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < BLOCK:
            with self._named():
                write(self._file, view)
            self._add(view, list(map(_sum, self._pieces(view))))
        else:
            with ThreadPoolExecutor(_THREADS) as threads, self._named():
                sums = [threads.submit(_sum, piece) for piece in self._pieces(view)]
                write(self._file, view)
            self._add(view, [future.result() for future in sums])
        return len(view)

    def _pieces(self, view: memoryview) -> Iterator[tuple[memoryview, int]]:
        """The parts of `view` that lie in one block each, with the sum of what is in that block already."""
        start = 0
        while start < len(view):
            filled = (self._size + start) % BLOCK
            end = min(start + BLOCK - filled, len(view))
            yield view[start:end], self._sums[-1] if filled and start == 0 else 0
            start = end

    def _add(self, view: memoryview, sums: list[int]) -> None:
        if self._size % BLOCK and sums:
            self._sums.pop()  # the first one goes on with it
        self._sums += sums
        self._size += len(view)

    def flush(self) -> None:
        """Nothing before the end: everything is flushed there at once."""

    def close(self) -> Entry:
        with self._named(), self._file:
            self._file.flush()
            sync(self._file.fileno())
        return Entry(self._size, self._sums)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of an open file do not say which one it is."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise


def write(file: Any, view: memoryview) -> None:
    file.write(view)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def summed_up(path: Path) -> Entry:
    """The entry of a file that is there already."""
    size = path.stat().st_size
    starts = range(0, size, BLOCK)
    if size <= BLOCK:
        return Entry(size, [_sum_of_block(path, start) for start in starts])
    with ThreadPoolExecutor(_THREADS) as threads:
        return Entry(size, list(threads.map(partial(_sum_of_block, path), starts)))


def _sum_of_block(path: Path, start: int) -> int:
    with open(path, "rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(BLOCK))


def _sum(piece: tuple[memoryview, int]) -> int:
    return zlib.crc32(*piece)
