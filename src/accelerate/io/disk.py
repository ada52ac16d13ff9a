"""Operations on the disk, one small function each, so that a test can make each of them fail.

Untrusted files are read only if they are regular files, and only up to a sensible size: a device or pipe with the name
of a file could be read, or waited for, forever.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePath
from typing import IO, Any


def write(descriptor: int, pieces: Sequence[Any], offset: int) -> None:
    """Write buffers to a file, one after another, from an offset on."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        count = os.pwritev(descriptor, left[:MOST_PIECES], offset)
        offset += count
        left = without_first(left, count)


def read(descriptor: int, pieces: Sequence[memoryview], offset: int) -> bool:
    """Fill buffers from a file, one after another, from an offset on. Returns False if the file is too short."""
    left = list(pieces)
    while left:
        count = os.preadv(descriptor, left[:MOST_PIECES], offset)
        if count == 0:
            return False
        offset += count
        left = without_first(left, count)
    return True


MOST_PIECES = 512  # of one call; systems take 1024


def without_first(views: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def start_flush(descriptor: int, offset: int, size: int) -> None:
    """Start writing a range of a file back to disk while the rest is being written. A hint: it may do nothing."""
    flush = _of_linux("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if flush is not None:
        flush(descriptor, offset, size, 2)  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing


def bring_in(address: int, size: int) -> bool:
    """Read a range of a mapped file into memory. If this fails (a broken disk), touching it could kill the process."""
    return _advise(address, size, 22)  # MADV_POPULATE_READ


def get_pages(address: int, size: int) -> None:
    """Allocate all pages of this memory now, which is faster than one by one on first write. A hint."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        _advise(first, whole, 23)  # MADV_POPULATE_WRITE


def _advise(address: int, size: int, advice: int) -> bool:
    advise = _of_linux("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise is not None and advise(address, size, advice) == 0


@cache
def _of_linux(name: str, *kinds: Any) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = kinds
    return function


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A context that yields a draft path beside `target`, and renames it to `target` if the block succeeds.

    A process that has the old file open or mapped keeps the old content. Each draft has a unique name, since other
    threads and processes may write the same file. If the block fails, the draft is deleted.
    """
    path = Path(target)
    if path.exists() and not path.is_file():
        # A device or a pipe is written to; it is never replaced.
        yield path
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{DRAFT}")
    try:
        yield draft
        rename(draft, path)
    finally:
        with suppress(OSError):
            remove(draft)


DRAFT = ".draft"


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def freed_behind(paths: Iterable[Path]) -> Iterator[None]:
    """A context in which replacing or removing these files only unlinks their names.

    Freeing their blocks takes a third of the time that writing them took, so a thread does it afterwards.
    """
    held: list[int] = []
    for path in paths:
        with suppress(OSError):
            if len(held) < _MOST_HELD and path.stat().st_size >= _WORTH_HOLDING:
                held.append(os.open(path, os.O_RDONLY))
                _held.add(held[-1])
    try:
        yield
    finally:
        # Network file systems give an open file another name, which would stay in the folder for as long.
        gone = held and not any(os.fstat(descriptor).st_nlink for descriptor in held)
        thread = threading.Thread(target=_close, args=(held,), name="accelerate-free")
        if gone and started(thread):
            _freeing.append(thread)
        else:
            _close(held)


_MOST_HELD = 64
_WORTH_HOLDING = 1 << 24
_freeing: list[threading.Thread] = []
_held: set[int] = set()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        _held.discard(descriptor)
        os.close(descriptor)


def _close_in_child() -> None:
    """Close the files in a forked loader worker, which would otherwise hold them for as long as it lives."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def wait_until_freed() -> None:
    """Return when the space of everything that was removed here is free."""
    while _freeing:
        _freeing.pop().join()


def started(thread: threading.Thread) -> bool:
    """Start a thread. Returns False if none can be started, as at interpreter exit."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def threads(count: int) -> Executor:
    """A pool of `count` threads. It runs everything in this thread if none can be started."""
    pool = ThreadPoolExecutor(count)
    try:
        pool.submit(int)  # it starts the first one
    except RuntimeError:
        return _ThisThread()
    return pool


class _ThisThread(Executor):
    """Runs everything immediately."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


# Far more than the index or the manifest of any model needs.
LARGEST_TEXT = 1 << 28


def open_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading, and refuse anything else."""
    # A pipe would keep us waiting for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def check_plain(path: str | os.PathLike[str]) -> None:
    """Raise if the path is not a regular file, for callers that open it themselves."""
    _check(os.stat(path).st_mode, path)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        reason = "Is a directory" if stat.S_ISDIR(mode) else "A device or a pipe, not a regular file"
        raise OSError(number, reason, os.fspath(path))


def read_text(path: str | os.PathLike[str], largest: int = LARGEST_TEXT) -> bytes:
    """The content of a file that should be small."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest} bytes")
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file. Raises a ValueError if anything is wrong with it."""
    return parsed(read_text(path))


def parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_inside(name: Any) -> bool:
    """Whether a relative name stays inside its folder. Names with a NUL byte are refused."""
    if not isinstance(name, str):
        return False
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
