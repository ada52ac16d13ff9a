"""What a checkpoint does to the disk, one small step each, so that each can be made to fail in a test."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """What a manifest says of a file: its size, and the checksum of each of its blocks."""

    size: int
    crc32: list[int]


def write(descriptor: int, pieces: Sequence[Any], offset: int) -> None:
    """Write pieces of memory one after the other, at a place in a file."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        count = os.pwritev(descriptor, left[:MOST_PIECES], offset)
        offset += count
        left = without_first(left, count)


MOST_PIECES = 512  # of one call; systems take 1024


def without_first(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of several pieces of memory after `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def start_flush(descriptor: int, offset: int, size: int) -> None:
    """Have the disk begin with a part of a file while the rest is still being written. A hint: it may do nothing."""
    if (flush := _sync_file_range()) is not None:
        flush(descriptor, offset, size, 2)  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing


@cache
def _sync_file_range() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


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
