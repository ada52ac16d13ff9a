"""Pinning (page-locking) existing host memory, so that a GPU copies it many times faster and asynchronously.

Pinning happens in threads that do nothing else: a refusal stays the last CUDA error of the calling thread, and the next
kernel that this thread launches would raise it.

Only whole pages can be pinned, and CUDA refuses to copy memory that is partly pinned. So a page that holds anything
else must not be pinned: any copy of that, anywhere in the process, would fail.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections import deque
from collections.abc import Callable

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every GPU
_READ_ONLY = 8  # cudaHostRegisterReadOnly: pages of files can be locked like this alone
# Four lock a GiB in 0.05 s, where one takes 0.07 s, and eight are no faster.
_THREADS = 4


def lock(device: torch.device, flags: int, address: int, size: int) -> bool:
    """Lock whole pages. Returns whether it succeeded. Only for the threads of a `Locker`."""
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, size, flags)) == 0


def unlock(device: torch.device, address: int) -> None:
    """Unlock what was locked from this address on. Only for the threads of a `Locker`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def is_locked(address: int) -> bool:
    # A tensor's own is_pinned looks at the first byte of its storage alone.
    return torch.frombuffer((ctypes.c_uint8 * 1).from_address(address), dtype=torch.uint8).is_pinned()


Lock = Callable[[int, int], bool]
Unlock = Callable[[int], None]


def calls_for(device: torch.device, read_only: bool = False) -> tuple[Lock, Unlock]:
    """The functions that a `Locker` needs for a GPU. read_only: for read-only pages, such as those of files."""
    flags = _PORTABLE | (_READ_ONLY if read_only else 0)
    return functools.partial(lock, device, flags), functools.partial(unlock, device)


def whole_pages(size: int) -> torch.Tensor:
    """New memory of this size that begins at a page, and shares its last page with nothing else."""
    memory = torch.empty(size + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    before = -memory.data_ptr() % mmap.PAGESIZE
    return memory[before : before + size]


class Locker:
    """Locks memory in threads that do nothing else, and unlocks it at the end.

    lock: takes an address and a size, and says whether it succeeded. unlock: takes an address.
    """

    def __init__(self, lock: Lock, unlock: Unlock) -> None:
        self._lock = lock
        self._unlock = unlock
        self._locked: list[int] = []
        self._todo: deque[tuple[int, int, Callable[[bool], None]]] = deque()
        self._guard = threading.Lock()
        self._working = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, start: int, size: int, tell: Callable[[bool], None]) -> None:
        """Lock whole pages soon. tell: called afterwards, with whether it succeeded."""
        with self._guard:
            self._todo.append((start, size, tell))
            if self._working < _THREADS:
                self._start_thread()

    def _start_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._work, name="page-lock", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the interpreter is ending: memory is as good unlocked, and it all goes soon
        self._working += 1
        self._threads.append(thread)

    def _next(self) -> tuple[int, int, Callable[[bool], None]] | None:
        with self._guard:
            if self._todo and not self._closed:
                return self._todo.popleft()
            self._working -= 1
            return None

    def _work(self) -> None:
        while (wanted := self._next()) is not None:
            start, size, tell = wanted
            succeeded = self._lock(start, size)
            if succeeded:
                self._locked.append(start)
            tell(succeeded)
        if self._closed:
            self._unlock_all()

    def _unlock_all(self) -> None:
        while self._locked:
            self._unlock(self._locked.pop())

    def adopt(self, start: int) -> None:
        """Take over memory that another `Locker` has locked, and unlock it in the end."""
        self._locked.append(start)

    def wait(self) -> None:
        """Wait until everything that was added is locked or refused."""
        for thread in list(self._threads):
            if thread is not threading.current_thread():  # where garbage is collected that this belongs to
                thread.join()

    def close(self) -> None:
        """Unlock everything: memory must not be freed while it is locked."""
        self._closed = True
        self.wait()
        if threading.current_thread() in self._threads:
            self._unlock_all()  # without the guard, which this very thread may hold
            return
        with self._guard:
            self._start_thread()
        self.wait()
