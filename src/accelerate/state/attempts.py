"""Attempts that all ranks make together: how each rank's has ended, before any of them makes another one.

The ranks tell each other through the store where they have met, since one that has broken off may be missed by others
in the middle of a collective. Over gloo it shuts its connections down then: their collectives fail, they break off,
too, and the process group is made anew. A collective of NCCL goes on waiting on the device, and nothing that torch
promises ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from accelerate.comm import Communicator, connections, current
from accelerate.diagnosis import limits
from accelerate.per_rank import are_ranks_threads
from accelerate.state.accelerator import AcceleratorState
from accelerate.state.lost import is_about_others
from accelerate.state.partial import PartialState
from accelerate.torch_internals.process_groups import own_connection

_CONNECTING = timedelta(minutes=2)
# How long others are given to break off by themselves: often all run out of memory in the same step.
_GRACE = 0.5
_ROOT = "accelerate/attempts"

_numbers = itertools.count()
_met_again = False


@dataclass(frozen=True)
class Report:
    """How an attempt has ended on one rank.

    again: whether it has to be made again, with this `size` at most. error: what else went wrong.
    cut_off: whether that is only that others have broken off.
    """

    again: bool
    size: int
    error: str | None = None
    cut_off: bool = False


class OthersWait(Exception):
    """This rank has broken off, and others do not: they wait for it where they cannot be reached."""


def report_of(error: Exception | None, again: bool, size: int) -> Report:
    text = None if error is None else f"{type(error).__name__}: {error}"
    return Report(again, size, text, isinstance(error, RuntimeError) and is_about_others(str(error)))


def exchange(report: Report, name: str) -> list[Report]:
    """The reports of all ranks; called on each of them after each attempt. name: of what is attempted.

    Afterwards they can talk to each other, whatever was going on when some of them broke off.
    """
    # Without a state there is no world to agree with, and asking for one would set it up.
    comm = current() if PartialState._shared_state else Communicator()
    store = own_connection(_CONNECTING) if comm.size > 1 and not are_ranks_threads() else None
    if store is None:
        return comm.gather_objects(report)
    return _Exchange(store, comm.rank, comm.size, name).through_store(report)


def remembered_size(name: str) -> int | None:
    """With which size the run before this one would have gone on, if it was started again because it could not."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not PartialState._shared_state:
        return None
    store = own_connection(_CONNECTING)
    key = f"{_ROOT}/next/{name}"
    return int(store.get(key)) if store is not None and store.check([key]) else None


def met_again() -> bool:
    """Whether the process group was made anew, so that models of before have one that is gone."""
    return _met_again


class _Exchange:
    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        self._store = store
        self._rank = rank
        self._name = name
        prefix = f"{_ROOT}/{PartialState._attempt().partition('-')[0]}/{next(_numbers)}"
        self._reports = [f"{prefix}/report/{each}" for each in range(size)]
        self._endings = [f"{prefix}/ending/{each}" for each in range(size)]

    def through_store(self, report: Report) -> list[Report]:
        self._tell(self._reports, asdict(report))
        broke = (report.again or report.error is not None) and self._break_off(report)
        self._wait(self._reports, None)
        reports = self._read()
        # Who has shut connections down says so only now: all have to know, or none would make the group anew.
        self._tell(self._endings, broke)
        self._wait(self._endings, None)
        if any(json.loads(self._store.get(key)) for key in self._endings):
            global _met_again
            _met_again = True
            PartialState()._meet_again()
        return reports

    def _break_off(self, report: Report) -> bool:
        """Have the others break off, too; whether connections were shut down for it."""
        if self._wait(self._reports, _GRACE):
            return False
        if report.cut_off and all(each.cut_off for each in self._read() if each.again or each.error is not None):
            raise OthersWait  # nobody has said why: one of them is gone
        if _can_meet_again():
            connections.shut_down()
            self._wait(self._reports, None)
            return True
        if report.again and self._wait(self._reports, limits.limit_from(os.environ) or None):
            return False
        # For a run that its launcher starts again: the store is the launcher's then.
        self._store.set(f"{_ROOT}/next/{self._name}", str(report.size))
        self._store.check([self._reports[self._rank]])
        raise OthersWait

    def _read(self) -> list[Report]:
        """The reports that are there."""
        there = [key for key in self._reports if self._store.check([key])]
        return [Report(**json.loads(self._store.get(key))) for key in there]

    def _tell(self, keys: list[str], value: Any) -> None:
        self._store.set(keys[self._rank], json.dumps(value))
        self._store.check([keys[self._rank]])  # it has arrived when this is answered

    def _wait(self, keys: list[str], seconds: float | None) -> bool:
        """Wait until all keys are there, or for so long; in pieces, between which signals are heard."""
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or time.monotonic() < until:
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=1))
                return True
        return bool(self._store.check(keys))


def _can_meet_again() -> bool:
    """Whether all that the ranks talk through is a group over gloo that this package has made."""
    shared: Any = AcceleratorState._shared_state
    more = shared.get("device_mesh") is not None or shared.get("deepspeed_plugins") is not None
    return PartialState().backend == "gloo" and connections.known() and not more
