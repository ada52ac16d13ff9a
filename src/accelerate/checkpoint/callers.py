"""Who calls a save: all processes, as it should be, or the main process alone, as many scripts do."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch.distributed as dist

# How long the main process waits for the first of the others: for once, and where it was known to be alone before.
PATIENCE = 30.0
KNOWN = 1.0

Callers = Literal["all", "alone", "late"]

_HERE, _ALL, _ALONE = "here", "all", "alone"


class Meeting:
    """Finds out, over the store of the process group, which has no need of processes that do not come.

    The saves that all have called are counted. The place of the next one in the store has how many others are `here`,
    whether they are `all` (which the main process says), and when the main process last went on `alone`.
    """

    def __init__(self) -> None:
        self._number = 0
        self._patience = PATIENCE

    def callers(self, point: int) -> Callers:
        """Call it at the start of a save.

        point: how far the training is, which is the same number on processes that call the same save. "late" is for
        those who come to a save that the main process has gone on with alone.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return "all"
        store = dist.PrefixStore(f"accelerate/save/{self._number}", dist.distributed_c10d._get_default_store())
        found: Callers = self._lead(store, point) if dist.get_rank() == 0 else self._follow(store, point)
        self._number += found == "all"
        return found

    def _lead(self, store: Any, point: int) -> Callers:
        started = time.monotonic()
        for pause in _pauses():
            here = store.add(_HERE, 0)
            if here == dist.get_world_size() - 1:
                store.set(_ALL, "")
                self._patience = PATIENCE
                return "all"
            if here == 0 and time.monotonic() - started > self._patience:
                store.set(_ALONE, str(point))
                self._patience = KNOWN
                return "alone"
            time.sleep(pause)
        raise AssertionError

    def _follow(self, store: Any, point: int) -> Callers:
        store.add(_HERE, 1)
        for pause in _pauses():
            if store.check([_ALL]):
                return "all"
            if store.check([_ALONE]) and int(store.get(_ALONE)) == point:
                store.add(_HERE, -1)
                return "late"
            time.sleep(pause)
        raise AssertionError


def _pauses() -> Any:
    """Short ones at first, which most meetings need none of."""
    pause = 0.0002
    while True:
        yield pause
        pause = min(pause * 1.5, 0.05)


# One for all that is saved by a process, as there is one store.
meeting = Meeting()
