"""Who calls a save: all processes, as it should be, or the main process alone, as many scripts do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from accelerate.comm import current
from accelerate.errors import CheckpointError
from accelerate.per_rank import PerRank
from accelerate.state import PartialState
from accelerate.torch_internals.process_groups import default_store, kept_connection

# How long the main process waits for the first of the others: for once, and where it was known to be alone before.
PATIENCE = 30.0
KNOWN = 1.0
# After so many seconds it says that it waits.
QUIET = 3.0

logger = logging.getLogger(__name__)

Callers = Literal["all", "alone", "late"]


class SaveRendezvous:
    """Finds out, over the store of the process group, which has no need of processes that do not come.

    The saves that all have called are counted. For each the main process makes one attempt, or several, as it may save
    alone in between, or give up and be called again. An attempt has in the store how many others are `here`, and then
    what the main process has `found`: that they are "all", that it was not so in time (""), or how far the training was
    when it went on alone.

    The main process asks how many have come. The others ask once, for an answer that comes when there is one: thousands
    of them that ask again and again would keep the store from answering anybody. A connection that waits for an answer
    takes no other question, so theirs is one of its own.
    """

    def __init__(self) -> None:
        self._number = 0
        self._patience = PATIENCE
        # The last attempt that this process has come to, where it counts once, however often it is called again.
        self._joined: tuple[str, int] | None = None

    def callers(self, point: int) -> Callers:
        """Call it at the start of a save.

        point: how far the training is, which is the same number on processes that call the same save. "late" is for
        those who come to a save that the main process has gone on with alone.
        """
        shared = default_store() if current().size > 1 else None
        if shared is None:
            return "all"
        prefix = f"accelerate/save/{PartialState._attempt()}/{self._number}"
        store = _Keys(kept_connection(shared.timeout) or shared, prefix, shared)
        found: Callers = self._lead(store, point) if current().rank == 0 else self._follow(store, point)
        self._number += found == "all"
        return found

    def _lead(self, store: _Keys, point: int) -> Callers:
        attempt, others, said = store.add("attempt", 0), current().size - 1, False
        for waited in _waiting(store.shared):
            here = store.add(f"{attempt}/here", 0)
            if waited > QUIET and here < others and not said:
                said = True
                logger.warning(
                    f"Rank 0 waits in save_state for the other processes ({here} of {others} are there): all "
                    f"should call it; if none has after {self._patience:g} seconds, rank 0 saves alone."
                )
            if here == others:
                store.set(f"{attempt}/found", "all")
                self._patience = PATIENCE
                return "all"
            if here == 0 and waited > self._patience:
                store.add("attempt", 1)  # first this: who gets an answer then makes no second attempt at this one
                store.set(f"{attempt}/found", str(point))
                self._patience = KNOWN
                return "alone"
        store.add("attempt", 1)  # who is called again meets at another one, where nobody was counted yet
        store.set(f"{attempt}/found", "")
        raise _nobody_came(f"{here} of {others} others came")

    def _follow(self, store: _Keys, point: int) -> Callers:
        attempt = store.add("attempt", 0)
        if attempt and store.get(f"{attempt - 1}/found") == str(point):
            return "late"
        again = self._joined == (store.prefix, attempt)
        if not again:
            store.add(f"{attempt}/here", 1)
            self._joined = store.prefix, attempt
        answer = _Answer(store, f"{attempt}/found")
        for _ in _waiting(store.shared):
            if answer.is_alive():
                continue
            if answer.error is not None:
                raise answer.error
            if answer.text == "all":
                return "all"
            if answer.text or again:  # the main process had just gone on, or given up as this one had before
                return self._follow(store, point)
            break
        raise _nobody_came("the main process or another one did not come")


@dataclass(frozen=True)
class _Keys:
    """What a store says of one save. shared: that of the process group, which others use as well."""

    store: Any
    prefix: str
    shared: Any

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(f"{self.prefix}/{key}", amount))

    def set(self, key: str, value: str) -> None:
        self.store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> str:
        """What is there, as soon as something is."""
        # A little longer than the process waits: so an error is one of the connection.
        self.store.wait([f"{self.prefix}/{key}"], self.shared.timeout + timedelta(seconds=5))
        return str(self.store.get(f"{self.prefix}/{key}").decode())


class _Answer(threading.Thread):
    """Waits for a key of a store: in a thread, so that the process can be interrupted meanwhile."""

    def __init__(self, store: _Keys, key: str) -> None:
        super().__init__(name="accelerate-save", daemon=True)
        self.text = ""
        self.error: Exception | None = None
        self._store = store
        self._key = key
        self.start()

    def run(self) -> None:
        try:
            self.text = self._store.get(self._key)
        except (RuntimeError, OSError) as error:
            self.error = error


def _waiting(store: Any) -> Iterator[float]:
    """How long one has waited by now, again and again, for as long as a collective may take."""
    started, pause = time.monotonic(), 0.0002  # most of the time no longer one is needed
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
_rendezvous: PerRank[SaveRendezvous] = PerRank(SaveRendezvous)
rendezvous = _rendezvous.get
