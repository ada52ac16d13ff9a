"""Weights in files, pinned in the page cache: the device copies them as it copies pinned memory.

What was read of a file stays in the page cache, which uses memory that is otherwise free. Its pages can be pinned
without a copy, as long as they are mapped read-only. So each weight is mapped by itself, read-only, once it has been
read: its pages are in memory then, and pinning does not wait for the disk.

Pinned pages cannot be used for anything else, so at most half of the free memory is pinned. The other weights are read
through buffers (devices/staging.py), as are all of them if pinning is refused.

A file that is truncated and rewritten gets new pages, and the pinned ones keep the old content. So each use checks
whether the file is still the same.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterable

import numpy as np
import torch

from accelerate.devices.free_memory import free_host_memory
from accelerate.devices.page_lock import Lock, Locker, Unlock
from accelerate.io.stored_tensors import FileRange

# A process can have 65,530 mappings, and offloaded_weights.py keeps some as well.
_MOST = 16_384
# How much each `LockedFiles` of this process has taken. The system goes on to call that free: these are pages of files.
_TAKEN: dict[int, int] = {}


class _Mapped:
    """The mapped pages of a weight. bytes: those of the weight itself."""

    def __init__(self, place: FileRange, handle: int) -> None:
        self._path = place.path
        self._info = os.fstat(handle)
        start = place.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        before = place.offset - start
        mapping = mmap.mmap(handle, before + place.nbytes, access=mmap.ACCESS_READ, offset=start)
        self._pages = np.frombuffer(mapping, dtype=np.uint8)
        self.address = self._pages.ctypes.data
        self.size = -(-self._pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Not from the array: torch would complain that nothing can be written there.
        raw = (ctypes.c_uint8 * place.nbytes).from_address(self.address + before)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8)

    def is_current(self) -> bool:
        """Whether the file is unchanged. A file that was unlinked cannot change any more."""
        try:
            info = os.stat(self._path)
        except OSError:
            return True
        if (info.st_dev, info.st_ino) != (self._info.st_dev, self._info.st_ino):
            return True
        return info.st_ctime_ns == self._info.st_ctime_ns


class LockedFiles:
    """Pins weights in files, and unpins them at the end.

    lock, unlock: as for a `Locker`, for read-only memory. free: the bytes of free memory.
    """

    def __init__(self, lock: Lock, unlock: Unlock, free: Callable[[], int] = free_host_memory) -> None:
        self._locker = Locker(lock, unlock)
        self._free = free
        self._room: int | None = None
        self._mapped: dict[FileRange, _Mapped | None] = {}  # None: it cannot be
        self._usable: dict[FileRange, _Mapped] = {}
        self._outdated: list[_Mapped] = []  # still locked

    def find(self, place: FileRange) -> torch.Tensor | None:
        """The bytes of a weight in pinned memory, if they are pinned."""
        mapped = self._usable.get(place)
        if mapped is None:
            return None
        if mapped.is_current():
            return mapped.bytes
        self._outdated.append(mapped)
        # Copies of a model share this, and may find it out at the same time.
        self._usable.pop(place, None)
        self._mapped.pop(place, None)
        return None

    def add(self, places: Iterable[FileRange]) -> None:
        """Pin these weights soon, if possible and if there is room."""
        for place in places:
            if place in self._mapped or not place.nbytes or len(self._mapped) >= _MOST:
                continue
            if self._room is None:
                self._room = (self._free() - sum(_TAKEN.values())) // 2
            self._mapped[place] = mapped = _map(place) if place.nbytes <= self._room else None
            if mapped is not None:
                self._room -= mapped.size
                _TAKEN[id(self)] = _TAKEN.get(id(self), 0) + mapped.size
                self._locker.add(mapped.address, mapped.size, functools.partial(self._note, place, mapped))

    def _note(self, place: FileRange, mapped: _Mapped, succeeded: bool) -> None:
        if succeeded:
            self._usable[place] = mapped
        else:
            self._mapped[place] = None

    def wait(self) -> None:
        """Wait until everything that was added is pinned or refused."""
        self._locker.wait()

    def close(self) -> None:
        """Unpin everything. No copy from here may still be running."""
        self._usable.clear()
        self._locker.close()
        self._usable.clear()  # what was being locked meanwhile
        self._mapped.clear()
        self._outdated.clear()
        _TAKEN.pop(id(self), None)


def _map(place: FileRange) -> _Mapped | None:
    """Map a weight. None if the file is gone or too short, which reading it will report."""
    try:
        handle = place.open()
        if handle is None:
            return None
        try:
            return _Mapped(place, handle)
        finally:
            os.close(handle)
    except (OSError, ValueError):
        return None
