"""Weights in pinned host memory: a device copies them at the speed of the bus, while it computes.

Memory is pinned in place, by separate threads, since that takes up to a fifth of a second per GiB. What is not pinned
yet, or cannot be, is copied through buffers (devices/staging.py). See devices/page_lock.py for the rest.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch

from accelerate.devices.page_lock import Lock, Locker, Unlock
from accelerate.torch_internals.offloaded_tensors import version_of

# From this size on glibc gives an allocation pages of its own, unless it has a place that is large enough left.
OWN_PAGES = 32 * 1024 * 1024
# Tensors smaller than this are copied to locked memory once, instead of through buffers again and again ...
SMALL = 64 * 1024
# ... up to as many bytes together.
MOST_COPIES = 64 * 1024 * 1024
_ALIGNED = 64  # as torch aligns what it allocates


def pages_of(storage: torch.UntypedStorage, page: int = mmap.PAGESIZE) -> tuple[int, int]:
    """The pages of a storage: their address and size."""
    start = storage.data_ptr() // page * page
    stop = -(-(storage.data_ptr() + storage.nbytes()) // page) * page
    return start, stop - start


def has_own_pages(storage: torch.UntypedStorage) -> bool:
    """Whether nothing else can be in the pages of a storage.

    A storage that is part of something (a mapped file, a NumPy array, another storage) cannot be resized. For others
    the allocator tells how many bytes are usable. If glibc has mapped pages for one allocation alone, it begins right
    behind a header in the first page, and may use all of the last page. Otherwise it may not, since the header of the
    next allocation needs room.
    """
    if storage.nbytes() < OWN_PAGES or not storage.resizable():
        return False
    address = storage.data_ptr()
    usable_size = _usable_size()
    if usable_size is None or not 0 < address % mmap.PAGESIZE <= _ALIGNED:
        return False
    return (address + usable_size(address)) % mmap.PAGESIZE == 0


@functools.cache
def _usable_size() -> Callable[[int], int] | None:
    """`malloc_usable_size` of the allocator in use. Without it, no memory is pinned in place."""
    try:
        function = ctypes.CDLL(None).malloc_usable_size
    except (OSError, TypeError, AttributeError):  # not a system of the kind
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_size_t
    usable_size: Callable[[int], int] = function
    return usable_size


class LockedCopies:
    """Small tensors, copied once to pinned memory. allocate: returns pinned memory of a given size."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], most: int = MOST_COPIES) -> None:
        self._allocate = allocate
        self._room = most
        self._copies: dict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        fresh: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            known = tensor.data_ptr() in fresh or not _is_small(tensor) or self.find(tensor) is not None
            if not known and _aligned(tensor) <= self._room:
                fresh[tensor.data_ptr()] = tensor
                self._room -= _aligned(tensor)
        starts = list(accumulate(map(_aligned, fresh.values()), initial=0))
        buffer = self._allocate(starts[-1]) if fresh else None
        for (address, tensor), start in zip(fresh.items(), starts, strict=False):
            assert buffer is not None
            copied = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._copies[address] = tensor, version_of(tensor), copied

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a tensor, unless the tensor has been written to since."""
        known, version, copied = self._copies.get(tensor.data_ptr(), (None, -1, None))
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            return None
        return copied if version_of(known) == version else None


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _is_small(tensor: torch.Tensor) -> bool:
    return 0 < tensor.nbytes < SMALL and version_of(tensor) is not None


# Those that are not closed yet.
_OPEN: dict[int, PageLocks] = {}


class PageLocks:
    """Pins the memory of tensors, keeps it alive, and unpins it at the end.

    Several models may have the same weights (one that is offloaded again, before its old hooks are collected): one of
    them pins the memory, and the last one unpins it.
    lock, unlock: as for a `Locker`. is_locked: whether an address is in pinned memory.
    """

    def __init__(self, lock: Lock, unlock: Unlock, is_locked: Callable[[int], bool]) -> None:
        self._locker = Locker(lock, self._give_up)
        self._unlock = unlock
        self._is_locked = is_locked
        self._known: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that the address stays theirs
        self._usable: set[int] = set()  # addresses of storages that are locked
        self._borrowed: set[int] = set()  # where the pages of those start that somebody else has locked
        _OPEN[id(self)] = self

    def covers(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._usable

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pin the memory of these tensors soon, if possible and if most of it is theirs."""
        used: Counter[int] = Counter()
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.nbytes >= SMALL and storage.data_ptr() not in self._known:
                storages[storage.data_ptr()] = storage
                used[storage.data_ptr()] += tensor.nbytes
        for address, storage in storages.items():
            if self._borrow(storage):
                self._known[address] = storage
                self._usable.add(address)
            elif has_own_pages(storage) and used[address] * 2 >= storage.nbytes():
                self._known[address] = storage
                self._locker.add(*pages_of(storage), functools.partial(self._note, storage))

    def _note(self, storage: torch.UntypedStorage, succeeded: bool) -> None:
        # Where another model with the same weights was faster, they are locked as well.
        if succeeded or self._borrow(storage):
            self._usable.add(storage.data_ptr())

    def _borrow(self, storage: torch.UntypedStorage) -> bool:
        """Whether someone else has pinned all of it."""
        first, start = storage.data_ptr(), pages_of(storage)[0]
        self._borrowed.add(start)  # at once: who has locked it may be about to give it up
        locked = self._is_locked(first) and self._is_locked(first + storage.nbytes() - 1)
        if not locked:
            self._borrowed.discard(start)
        return locked

    def _give_up(self, start: int) -> None:
        for other in list(_OPEN.values()):
            if start in other._borrowed:
                other._borrowed.discard(start)
                other._locker.adopt(start)
                return
        self._unlock(start)

    def wait(self) -> None:
        """Wait until everything that was added is pinned or refused."""
        self._locker.wait()

    def close(self) -> None:
        """Unpin everything that nobody else uses: memory must not be freed while it is pinned."""
        _OPEN.pop(id(self), None)
        self._usable.clear()
        self._locker.close()
        self._usable.clear()  # what was being locked meanwhile
        self._known.clear()
