"""The end of process groups, of the program, and forks, with threads of torch that still put away the last collective.

Such a thread may hold the last reference to a tensor that Python knows, and needs Python's lock to free it:
- freeing a group waits for its threads while it holds that lock: both would wait forever;
- at the end of the program a thread that asks for the lock is killed, and aborts the process (torch up to 2.13);
- a fork just when a thread begins to ask leaves the child waiting for it forever (Python up to 3.11).
So groups that were taken down are kept for a while, and before an end or a fork all threads get the lock. A script may
take them down by torch's own function, of which nobody tells us: then what still holds them is let go at the end.
"""

from __future__ import annotations

import atexit
import functools
import time
from typing import Any

import torch.distributed as dist

from accelerate.comm import Communicator, existing, set_current
from accelerate.torch_internals.process_groups import all_groups

_taken_down: list[dist.ProcessGroup] = []
# Those of the last world and before. When the next one is taken down, their threads have been idle for long.
_earlier: list[dist.ProcessGroup] = []
# Whether this process was ever in a group.
_joined = False


def joined() -> None:
    """This process is in a group: from now on there may be such threads, whoever takes the group down."""
    global _joined
    _joined = True


def take_down(group: dist.ProcessGroup | None) -> None:
    """Destroy one group, or (None) all of them."""
    everything = group is None or group is dist.group.WORLD
    if group is not None:
        _taken_down.append(group)
    if everything:
        _earlier[:] = [*_taken_down, *all_groups()]
        _taken_down.clear()
    dist.destroy_process_group(group)


def let_threads_finish(naps: int) -> None:
    """Give up the lock for a while, if there are such threads.

    Short naps, not a long one: on a busy machine, each time this thread gets a core again, others had theirs.
    """
    if _joined or (dist.is_available() and dist.is_initialized()):
        for _ in range(naps):
            time.sleep(0.001)


@atexit.register
def _free_groups() -> None:
    let_threads_finish(naps=40)
    # Not later than this: groups that outlive the interpreter abort the process, too. Those that torch still knows are
    # torch's to end.
    _taken_down.clear()
    _earlier.clear()
    if not _joined:
        return
    # Exit handlers that the script registered before it imported this package come later, and may still talk.
    talking = existing() if dist.is_initialized() else None
    set_current(None if talking is None else Unhurried(talking))  # type: ignore[arg-type]


class Unhurried:
    """A communicator that lets the threads finish after each call, for each may be the last one of the program."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return value(*args, **kwargs)
            finally:
                let_threads_finish(naps=40)

        return call
