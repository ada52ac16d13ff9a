"""Who calls a save: all processes, as it should be, or the main process alone, as many scripts do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Literal

from accelerate.comm import current
from accelerate.errors import CheckpointError
from accelerate.per_rank import PerRank
from accelerate.torch_internals.process_groups import default_store

# How long the main process waits for the first of the others: for once, and where it was known to be alone before.
PATIENCE = 30.0
KNOWN = 1.0
# After so many seconds it says that it waits.
QUIET = 3.0

logger = logging.getLogger(__name__)

Callers = Literal["all", "alone", "late"]


class Meeting:
    """Finds out, over the store of the process group, which has no need of processes that do not come.

    The saves that all have called are counted. For each the main process makes one attempt, or several, as it may save
    alone in between. An attempt has in the store how many others are `here`, and then that they are `all`, or how far
    the training was when the main process went on `alone`.
    """

    def __init__(self) -> None:
        self._number = 0
        self._patience = PATIENCE

    def callers(self, point: int) -> Callers:
        """Call it at the start of a save.

        point: how far the training is, which is the same number on processes that call the same save. "late" is for
        those who come to a save that the main process has gone on with alone.
        """
        store = default_store(f"accelerate/save/{self._number}") if current().size > 1 else None
        if store is None:
            return "all"
        found: Callers = self._lead(store, point) if current().rank == 0 else self._follow(store, point)
        self._number += found == "all"
        return found

    def _lead(self, store: Any, point: int) -> Callers:
        attempt, others, said = store.add("attempt", 0), current().size - 1, False
        for waited in _waiting(store):
            here = store.add(f"{attempt}/here", 0)
            if waited > QUIET and here < others and not said:
                said = True
                logger.warning(
                    f"Rank 0 waits in save_state for the other processes, of which {here} of {others} have come: all "
                    f"should call it; if none has after {self._patience:g} seconds, rank 0 saves alone."
                )
            if here == others:
                store.set(f"{attempt}/all", "")
                self._patience = PATIENCE
                return "all"
            if here == 0 and waited > self._patience:
                store.set(f"{attempt}/alone", str(point))
                store.add("attempt", 1)
                self._patience = KNOWN
                return "alone"
        raise _nobody_came(f"{here} of {others} others came")

    def _follow(self, store: Any, point: int) -> Callers:
        attempt = store.add("attempt", 0)
        if attempt and int(store.get(f"{attempt - 1}/alone")) == point:
            return "late"
        store.add(f"{attempt}/here", 1)
        for _ in _waiting(store):
            if store.check([f"{attempt}/all"]):
                return "all"
            if store.add("attempt", 0) > attempt:  # the main process had just gone on
                return self._follow(store, point)
        raise _nobody_came("the main process or another one did not come")


def _waiting(store: Any) -> Iterator[float]:
    """How long one has waited by now, again and again, for as long as a collective may take."""
    started, pause = time.monotonic(), 0.0002  # most meetings need no longer one
    while (waited := time.monotonic() - started) < store.timeout.total_seconds():
        yield waited
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _nobody_came(who: str) -> CheckpointError:
    return CheckpointError(
        f"Rank {current().rank} has waited in save_state for as long as the process group allows, and {who}: see what "
        "the other processes are doing, and call save_state on all of them, or on the main process alone."
    )


# One for all that is saved by a rank, as there is one store.
_meeting: PerRank[Meeting] = PerRank(Meeting)
meeting = _meeting.get
