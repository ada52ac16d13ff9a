"""Attempts that all ranks make together: how each rank's has ended, before any of them makes another one.

The ranks tell each other through the store where they have met, since one that has broken off may be missed by others
in the middle of a collective. Over gloo it shuts its connections down then: their collectives fail, they break off,
too, and the process group is made again. Over NCCL each rank has a thread that aborts the group when it is told to.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from accelerate.comm import Communicator, connections, current
from accelerate.comm.aborting import AbortOnWord
from accelerate.diagnosis import limits
from accelerate.per_rank import are_ranks_threads
from accelerate.state import stopping
from accelerate.state.accelerator import AcceleratorState
from accelerate.state.lost import is_about_others
from accelerate.state.partial import PartialState
from accelerate.torch_internals.process_groups import all_groups, begun_by_group, can_abort, own_connection

_CONNECTING = timedelta(minutes=2)
# How long others are given to break off by themselves: often all run out of memory in the same step.
_GRACE = 0.5
# Between two questions to the store, in seconds.
_SHORTEST, _LONGEST = 0.01, 0.5
_ROOT = "accelerate/attempts"

_numbers = itertools.count()
_met_again = False


@dataclass(frozen=True)
class Report:
    """How an attempt has ended on one rank.

    again: whether it has to be made again, with this `size` at most. error: what else went wrong.
    cut_off: whether that is only that others have broken off. begun: how many collectives, by group. passed: how many
    steps at which it was asked whether to stop.
    """

    again: bool
    size: int
    error: str | None = None
    cut_off: bool = False
    begun: dict[str, int] = field(default_factory=dict)
    passed: int = 0

    @property
    def broken_off(self) -> bool:
        return self.again or self.error is not None


class OthersWait(Exception):
    """Ranks have broken off, and others wait for them where they cannot be reached. reports: by rank, those known."""

    def __init__(self, reports: dict[int, Report]) -> None:
        super().__init__()
        self.reports = reports


def report_of(error: Exception | None, again: bool, size: int) -> Report:
    text = None if error is None else f"{type(error).__name__}: {error}"
    return Report(again, size, text, isinstance(error, RuntimeError) and is_about_others(str(error)))


class Attempt:
    """One attempt of all ranks: made inside of `with`, then `exchange` tells each rank how it went on the others.

    Args:
        name: of what is attempted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._prefix = f"{_ROOT}/{PartialState._attempt().partition('-')[0]}/{next(_numbers)}"
        self._aborting: AbortOnWord | None = None

    def __enter__(self) -> Attempt:
        comm = _world()
        if comm.size > 1 and not are_ranks_threads() and _talks_over("nccl") and can_abort():
            waiting, telling = own_connection(_CONNECTING), own_connection(_CONNECTING)
            if waiting is not None:
                # From here on NCCL has connected the ranks: while it does, a wait cannot be ended.
                comm.all_reduce(torch.zeros(1, device=PartialState().device))
                keys = [f"{self._prefix}/leave/{rank}" for rank in range(comm.size)]
                self._aborting = AbortOnWord(waiting, telling, keys, comm.rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._aborting is not None:
            self._aborting.close()

    def exchange(self, report: Report) -> list[Report]:
        """The reports of all ranks; called on each of them.

        Afterwards they can talk to each other, whatever was going on when some of them broke off.
        """
        comm = _world()
        store = own_connection(_CONNECTING) if comm.size > 1 and not are_ranks_threads() else None
        if store is None:
            return comm.gather_objects(report)
        own = replace(report, begun=begun_by_group(), passed=stopping.passed())
        reports = _Exchange(store, comm.rank, comm.size, self._prefix, self._name, self._aborting).through_store(own)
        stopping.catch_up(max(each.passed for each in reports))
        return reports


def _world() -> Communicator:
    # Without a state there is no world to agree with, and asking for one would set it up.
    return current() if PartialState._shared_state else Communicator()


def remembered_size(name: str) -> int | None:
    """With which size the run before this one would have gone on, if it was started again because it could not."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not PartialState._shared_state:
        return None
    store = own_connection(_CONNECTING)
    key = f"{_ROOT}/next/{name}"
    return int(store.get(key)) if store is not None and store.check([key]) else None


def met_again() -> bool:
    """Whether the process group was made again, so that models of before have one that is gone."""
    return _met_again


class _Exchange:
    def __init__(
        self, store: Any, rank: int, size: int, prefix: str, name: str, aborting: AbortOnWord | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._name = name
        self._aborting = aborting
        self._reports = [f"{prefix}/report/{each}" for each in range(size)]
        self._endings = [f"{prefix}/ending/{each}" for each in range(size)]

    def through_store(self, report: Report) -> list[Report]:
        self._tell(self._reports, asdict(report))
        broke = report.broken_off and self._break_off(report)
        self._wait(self._reports, None)
        reports = list(self._read().values())
        if not any(each.broken_off for each in reports):
            return reports
        apart = any(each.again for each in reports) and _are_apart(reports)
        if apart and not broke and self._can_meet_again():
            self._cut_off()  # what some have begun, and others never will
            broke = True
        # Who has shut connections down says so only now: all have to know, or none would make the group again.
        self._tell(self._endings, broke)
        self._wait(self._endings, None)
        endings = [json.loads(self._store.get(key)) for key in self._endings]
        if None in endings or (apart and not any(endings)):
            raise self._left()
        if any(endings):
            global _met_again
            _met_again = True
            if self._aborting is not None:
                self._aborting.leave()
            PartialState()._meet_again()
        return reports

    def _break_off(self, report: Report) -> bool:
        """Have the others break off, too; whether they were cut off for it."""
        if self._wait(self._reports, _GRACE):
            return False
        if report.cut_off and all(each.cut_off for each in self._read().values() if each.broken_off):
            raise self._left()  # nobody has said why: one of them is gone
        limit = limits.limit_from(os.environ)
        if self._can_meet_again():
            self._cut_off()
            # An error is to be seen, also where another rank computes for long.
            if self._wait(self._reports, None if report.again else limit or limits.DEFAULT_LIMIT):
                return True
        elif report.again and self._wait(self._reports, limit or None):
            return False
        raise self._left()

    def _cut_off(self) -> None:
        """End the collectives in which this rank and the others wait for each other."""
        if self._aborting is not None:
            self._aborting.others_leave()
        connections.shut_down()

    def _can_meet_again(self) -> bool:
        """Whether all that the ranks talk through is a group that this package has made, and that can be cut off."""
        return _is_one_group() and (self._aborting is not None or (_talks_over("gloo") and connections.known()))

    def _left(self) -> OthersWait:
        """To be raised: this rank does not go on with the others, and they know."""
        reports = self._read()
        # For a run that its launcher starts again: the store is the launcher's then.
        sizes = [each.size for each in reports.values() if each.again]
        if sizes:
            self._store.set(f"{_ROOT}/next/{self._name}", str(min(sizes)))
        self._tell(self._endings, None)
        return OthersWait(reports)

    def _read(self) -> dict[int, Report]:
        """The reports that are there."""
        there = [(rank, key) for rank, key in enumerate(self._reports) if self._store.check([key])]
        return {rank: Report(**json.loads(self._store.get(key))) for rank, key in there}

    def _tell(self, keys: list[str], value: Any) -> None:
        self._store.set(keys[self._rank], json.dumps(value))
        self._store.check([keys[self._rank]])  # it has arrived when this is answered

    def _wait(self, keys: list[str], seconds: float | None) -> bool:
        """Wait until all keys are there, or for so long; raises where the store is gone."""
        until = None if seconds is None else time.monotonic() + seconds
        # Asked now and then: torch prints two lines whenever a wait of its own runs out, and hears no signals in it.
        pause = _SHORTEST
        while not self._store.check(keys):
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True


def _are_apart(reports: list[Report]) -> bool:
    """Whether some have begun collectives of a group that others in it have not."""
    begun: dict[str, set[int]] = {}
    for report in reports:
        for group, count in report.begun.items():
            begun.setdefault(group, set()).add(count)
    return any(len(counts) > 1 for counts in begun.values())


def _talks_over(backend: str) -> bool:
    return bool(PartialState().backend == backend)


def _is_one_group() -> bool:
    """Whether there is no group beside the first: nobody would make those of a mesh, of the script or of a save in the
    background again."""
    shared: Any = AcceleratorState._shared_state
    more = shared.get("device_mesh") is not None or shared.get("deepspeed_plugins") is not None
    return len(all_groups()) == 1 and not more
