from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from accelerate.devices.page_lock import Locker
from accelerate.offload import cuda_copier, locked_memory
from accelerate.offload.locked_memory import OWN_PAGES, SMALL, LockedCopies, PageLocks, has_own_pages, pages_of

PAGE = 4096


class Driver:
    """What CUDA would do. Pages are never touched, so the large tensors below cost nothing."""

    def __init__(self, refuse: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.refuse = refuse
        self.threads: set[str] = set()
        self._guard = threading.Lock()

    def lock(self, address: int, size: int) -> bool:
        with self._guard:
            self.calls += 1
            self.threads.add(threading.current_thread().name)
            if self.refuse or self.is_locked(address):
                return False
            self.locked[address] = size
            return True

    def unlock(self, address: int) -> None:
        self.threads.add(threading.current_thread().name)
        del self.locked[address]

    def is_locked(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self.locked.items())

    def locks(self) -> PageLocks:
        return PageLocks(self.lock, self.unlock, self.is_locked)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def large(count: int = OWN_PAGES) -> torch.Tensor:
    """With pages of its own, if it is large enough: not in a gap that earlier tests have left."""
    gaps = []
    while not has_own_pages((tensor := torch.empty(count, dtype=torch.uint8)).untyped_storage()) and count >= OWN_PAGES:
        gaps.append(tensor)
    return tensor


def test_locks_in_the_background_and_unlocks_in_the_end(driver: Driver) -> None:
    locks = driver.locks()
    tensors = [large(OWN_PAGES + i) for i in range(8)]
    locks.add(tensors)
    locks.wait()
    assert all(locks.covers(tensor) for tensor in tensors)
    assert driver.threads == {"page-lock"}
    for tensor in tensors:
        assert driver.is_locked(tensor.data_ptr()) and driver.is_locked(tensor.data_ptr() + tensor.nbytes - 1)
    locks.add(tensors)
    locks.wait()
    assert driver.calls == 8
    locks.close()
    assert driver.locked == {}
    assert driver.threads == {"page-lock"}  # a failure must not stay behind in anybody's thread
    assert not locks.covers(tensors[0])


def test_whole_pages() -> None:
    storage = large(OWN_PAGES + 1).untyped_storage()
    start, size = pages_of(storage)
    assert start % PAGE == size % PAGE == 0
    assert start <= storage.data_ptr() < start + PAGE
    assert start + size - PAGE < storage.data_ptr() + storage.nbytes() <= start + size


def test_a_large_tensor_in_a_gap_between_others_has_neighbors() -> None:
    """The allocator takes a free place that is large enough, where it would otherwise ask for pages."""
    code = """
import torch
from accelerate.offload.locked_memory import has_own_pages

MIB = 2**20

def make(size):
    return torch.empty(size * MIB, dtype=torch.uint8)

def is_in_heap(tensor):
    [heap] = [line.split()[0] for line in open("/proc/self/maps") if line.endswith("[heap]\\n")]
    start, end = (int(part, 16) for part in heap.split("-"))
    return start <= tensor.data_ptr() < end

make(31)  # when that is freed, smaller ones come from the heap
lasts, large = [], []
while not any(map(is_in_heap, large)) and len(large) < 100:  # where there is one is up to the system
    row = [make(9) for _ in range(9)]
    lasts.append(row.pop())
    row.clear()
    large.append(make(40))
assert any(map(is_in_heap, large)), "there is no such gap"
assert not any(has_own_pages(tensor.untyped_storage()) for tensor in large if is_in_heap(tensor))
assert has_own_pages(make(200).untyped_storage())
"""
    for _ in range(5):  # where the heap is, and how far it can grow, is drawn anew for each process
        done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        if "there is no such gap" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


def test_neighbors_are_never_in_locked_pages(driver: Driver) -> None:
    """Large and small tensors, taken in turns: nothing but the large ones is locked, not even a byte."""
    locks = driver.locks()
    tensors, others = [], []
    for size in (100, 5000, SMALL, OWN_PAGES // 64, OWN_PAGES // 4, OWN_PAGES - 1) * 3:
        others.append(large(size))
        tensors.append(large(OWN_PAGES))
    locks.add([*tensors, *others])
    locks.wait()
    assert len(driver.locked) == len(tensors)
    for other in others:
        assert not locks.covers(other)
        assert not driver.is_locked(other.data_ptr())
        assert not driver.is_locked(other.data_ptr() + other.nbytes - 1)
    locks.close()


def test_pieces_of_something_else_are_not_locked(driver: Driver, tmp_path: Path) -> None:
    """Each of these shares its first or its last page with what is beside it."""
    (tmp_path / "f").touch()
    mapped = np.memmap(tmp_path / "f", dtype=np.uint8, mode="w+", shape=(2 * OWN_PAGES + 100,))
    array = np.empty(2 * OWN_PAGES + 100, dtype=np.uint8)
    storage = large(2 * OWN_PAGES).untyped_storage()
    pieces = [
        torch.from_numpy(mapped[100 : OWN_PAGES + 200]),
        torch.from_numpy(array[100 : OWN_PAGES + 200]),
        torch.frombuffer((ctypes.c_uint8 * (OWN_PAGES + 5)).from_buffer(array, 7), dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8).set_(storage[5 : OWN_PAGES + 10]),  # type: ignore[call-overload]
    ]
    locks = driver.locks()
    locks.add(pieces)
    locks.wait()
    assert driver.calls == 0
    assert not any(has_own_pages(piece.untyped_storage()) or locks.covers(piece) for piece in pieces)
    locks.close()


def test_nothing_is_locked_where_the_allocator_does_not_tell(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights then go through buffers."""
    tensor = large()
    monkeypatch.setattr(locked_memory, "_usable_size", lambda: None)
    locks = driver.locks()
    locks.add([tensor])
    locks.wait()
    assert driver.calls == 0 and not locks.covers(tensor)
    locks.close()


def test_views_of_one_storage_lock_it_once(driver: Driver) -> None:
    locks = driver.locks()
    whole = large(2 * OWN_PAGES)
    first, second = whole[: OWN_PAGES + 10], whole[OWN_PAGES + 10 :].view(torch.int16)
    locks.add([first, second, whole.view(2, -1), first])
    locks.wait()
    start, size = pages_of(whole.untyped_storage())
    assert driver.locked == {start: size}
    assert locks.covers(first) and locks.covers(second) and locks.covers(whole)
    locks.close()


def test_a_storage_of_which_little_is_used_is_not_locked(driver: Driver) -> None:
    locks = driver.locks()
    whole = large(3 * OWN_PAGES)
    locks.add([whole[:OWN_PAGES]])
    locks.wait()
    assert driver.calls == 0
    locks.close()


def test_the_memory_lives_for_as_long_as_it_is_locked(driver: Driver) -> None:
    locks = driver.locks()
    tensor = large()
    address = tensor.data_ptr()
    locks.add([tensor])
    locks.wait()
    del tensor
    others = [large() for _ in range(8)]
    assert address not in {other.data_ptr() for other in others}
    locks.close()
    assert not locks._known, "free at once"


def test_garbage_may_be_collected_in_a_thread_that_takes_the_next_piece(driver: Driver) -> None:
    locker = Locker(driver.lock, driver.unlock)

    class Collected(deque[Any]):
        def popleft(self) -> Any:
            if len(self) == 1:
                locker.close()
                locked.append(dict(driver.locked))
                done.set()
            return super().popleft()

    locked: list[dict[int, int]] = []
    done = threading.Event()
    locker._todo = Collected()
    with locker._guard:  # so that all is there when the thread begins
        locker._todo += [(PAGE * i, PAGE, bool) for i in (1, 2, 3)]
        locker._start_thread()
    assert done.wait(10), "it waits for itself"
    assert locked == [{}]
    locker.wait()
    assert driver.locked == {}


def test_what_is_refused_is_not_covered() -> None:
    driver = Driver(refuse=True)
    locks = driver.locks()
    tensor = large()
    locks.add([tensor])
    locks.wait()
    assert driver.calls == 1
    assert not locks.covers(tensor)
    locks.close()


def test_what_somebody_else_has_locked_is_used_if_all_of_it_is(driver: Driver) -> None:
    whole, begun, pinned = large(), large(), large(10 * SMALL)
    driver.locked = dict([pages_of(whole.untyped_storage()), pages_of(pinned.untyped_storage())])
    driver.locked[pages_of(begun.untyped_storage())[0]] = PAGE
    theirs = dict(driver.locked)
    locks = driver.locks()
    locks.add([whole, begun, pinned])
    locks.wait()
    assert locks.covers(whole) and locks.covers(pinned) and not locks.covers(begun)
    locks.close()
    assert driver.locked == theirs


def test_memory_that_several_models_use_is_unlocked_by_the_last_one(driver: Driver) -> None:
    tensors = [large(), large()]
    models = [driver.locks() for _ in range(3)]
    for locks in models:
        locks.add(tensors)
        locks.wait()
    assert driver.calls == 2
    for locks in (models[0], models[2]):  # the one that has locked it, and one that has not
        locks.close()
        assert len(driver.locked) == 2 and all(map(models[1].covers, tensors))
    models[1].close()
    assert driver.locked == {}


def test_a_forked_process_leaves_everything_as_it_is(driver: Driver) -> None:
    """It has neither the threads of its parent nor its CUDA."""
    locks, tensor, nothing = driver.locks(), large(), cast(Any, None)
    locks.add([tensor])
    locks.wait()
    cuda_copier._close(os.getpid() + 1, nothing, nothing, locks, nothing)
    assert locks.covers(tensor) and len(driver.locked) == 1
    locks.close()


def test_small_tensors_are_copied_once() -> None:
    sizes = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    copies = LockedCopies(allocate)
    norm, bias, empty = torch.randn(5), torch.randn(3, 2).half(), torch.empty(0)
    large = torch.empty(SMALL, dtype=torch.uint8)
    copies.add([norm, bias, empty, large])
    assert sizes == [128]
    for tensor in (norm, bias):
        copied = copies.find(tensor)
        assert copied is not None and torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()
    assert copies.find(empty) is None and copies.find(large) is None
    copies.add([norm, bias])
    assert sizes == [128]
    norm.add_(1)
    assert copies.find(norm) is None
    copies.add([norm])
    found = copies.find(norm)
    assert found is not None and torch.equal(found, norm)


def test_copies_take_little_memory() -> None:
    sizes = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    copies = LockedCopies(allocate, most=1000)
    tensors = [torch.randn(100) for _ in range(5)]  # 400 bytes, 448 with what lies between
    copies.add(tensors)
    copies.add(tensors)
    assert sizes == [2 * 448]
    assert [copies.find(tensor) is not None for tensor in tensors] == [True, True, False, False, False]
