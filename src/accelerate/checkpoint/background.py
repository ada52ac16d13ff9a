"""Writing a checkpoint while training goes on: from copies, in a thread, and with a process group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate.checkpoint.host import HostMemory
from accelerate.comm import current

# How the processes exchange something: the value of each, by rank.
Gather = Callable[[Any], list[Any]]


class Background:
    """One save at a time. What went wrong is raised by `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: Any = None
        self.memory = HostMemory()

    def start(self, work: Callable[[Gather, Any], None]) -> None:
        """Run `work` behind the training; call it on all processes, after `wait`."""
        gather = self._gather()

        def run() -> None:
            try:
                work(gather, self._group)
            except Exception as error:
                self._error = error

        # No daemon: at the end of the program Python waits for it, so a checkpoint that was begun is finished.
        self._thread = threading.Thread(target=run, name="accelerate-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is on the disk; raise what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _gather(self) -> Gather:
        communicator = current()
        if communicator.size == 1:
            return communicator.gather_objects
        if self._group is None:
            # Messages of the training must not meet those of the save. A disk may be slow: a day, not half an hour.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        group, size = self._group, communicator.size

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=group)
            return values

        return gather
