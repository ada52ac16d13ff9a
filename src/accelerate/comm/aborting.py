"""Ending collectives over NCCL in which this rank waits for one that has broken off.

There a kernel waits on the device, and the program most often waits for the kernel: it hears nothing else. So a thread
waits for a word in the store, and aborts the process group. What kernels have written by then is not to be used, and
the next collective of the group raises an error.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate.torch_internals.process_groups import abort

_FOREVER = timedelta(days=365)
# For an abort that is under way: it takes half a second.
_PATIENCE = 30.0
_LEAVE = b"leave"


class AbortOnWord:
    """Aborts the default group when this rank is told to leave.

    Args:
        waiting: a connection to the store for the thread. One that waits answers nothing else.
        telling: another one.
        keys: of the store, one per rank: where each is told.
        rank: this one.
    """

    def __init__(self, waiting: Any, telling: Any, keys: list[str], rank: int) -> None:
        self._keys = keys
        self._rank = rank
        self._group = dist.group.WORLD
        self._left = False
        self._waiting = waiting
        self._telling = telling
        self._thread = threading.Thread(target=self._run, name="accelerate-abort", daemon=True)
        self._thread.start()

    def others_leave(self) -> None:
        """Tell all other ranks to leave, and leave here: this rank has broken off."""
        for rank, key in enumerate(self._keys):
            if rank != self._rank:
                self._telling.set(key, _LEAVE)
        self.leave()

    def leave(self) -> None:
        """Abort the group of this rank, if that was not done before."""
        if not self._left:
            self._left = True
            abort(self._group)

    def close(self) -> None:
        """Wait for no word any longer."""
        with suppress(RuntimeError, OSError):  # the store is gone: the thread knows
            self._telling.set(self._keys[self._rank], b"end")
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        key = self._keys[self._rank]
        with suppress(RuntimeError, OSError):  # the store is gone, and the run with it
            self._waiting.wait([key], _FOREVER)
            if self._waiting.get(key) == _LEAVE:
                self.leave()
