"""Writing a checkpoint while training goes on: from copies, in a thread, and with a process group of its own."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from accelerate.comm import current
from accelerate.io.host_memory import HostMemory
from accelerate.per_rank import PerRank, on_this_rank

logger = logging.getLogger(__name__)

# How the processes exchange something: the value of each, by rank.
Gather = Callable[[Any], list[Any]]

# Those of all Accelerators of this rank: a notebook may make a second one while the first still writes.
_writing: PerRank[set[threading.Thread]] = PerRank(set)


class Background:
    """One save at a time. What went wrong is raised by `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._waited_for = False
        self.memory = HostMemory()

    def start(self, work: Callable[[Gather, Any], None]) -> None:
        """Run `work` behind the training; call it on all processes, after `wait`."""
        gather, group = current().side_channel()
        first = current().rank == 0

        def run() -> None:
            time.sleep(0.001)  # so that it is the training that goes on first, and not this
            try:
                work(gather, group)
            except Exception as error:
                self._error = error
                if first:  # a script that ends now would never hear of it
                    logger.error("The last checkpoint was not saved: %s", error)
            finally:
                _writing.get().discard(threading.current_thread())

        if not threading.main_thread().is_alive():  # the end has come, which waits for nothing that begins now
            run()
            return
        # No daemon: a checkpoint that was begun is finished, also at the end of the program.
        self._thread = threading.Thread(target=on_this_rank(run), name="accelerate-checkpoint")
        _writing.get().add(self._thread)
        self._thread.start()
        if not self._waited_for:
            # Python waits for threads at its end, but lets them start no others by then, which a save needs to do.
            # This is called before, as are the functions that `concurrent.futures` registers.
            threading._register_atexit(_join, weakref.ref(self))  # type: ignore[attr-defined]
            self._waited_for = True

    def wait(self) -> None:
        """Return when the last save of this process is on the disk; raise what our own failed with, once."""
        for thread in (*_writing.get(), *([] if self._thread is None else [self._thread])):
            thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _join(background: weakref.ref[Background]) -> None:
    running = background()
    if running is not None and running._thread is not None:
        running._thread.join()
