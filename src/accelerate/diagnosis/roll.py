"""The roll of a run: what each rank has noted of itself in the store, as one text for a person.

The store is where the ranks have met: it answers also when the group that they talk through hangs.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.config.environment import parse_flag_from_env

ROOT = "accelerate/hang"
# Where the notes of the present attempt are, and of how many ranks: for a launcher, which is no rank.
NOW = f"{ROOT}/now"


@dataclass(frozen=True)
class Note:
    """What a rank says of itself.

    kind: "waits", "runs", "moves" (it goes on with collectives), "ended", "failed", "left" (the group); "silent" if it
    says nothing, "absent" if it has not come to where the group is made.
    call, line: where it is, or where it failed or ended. since: the time at which it came there. text: the error, or
    the code, if it is known.
    """

    kind: str
    call: str = ""
    line: str = ""
    since: float = 0.0
    text: str = ""
    host: str = ""
    stack: str = ""


SILENT = Note("silent")
_GOOD_CODES = ("", "0")


class Notes:
    """The notes of all ranks of one attempt, in a store."""

    headline = "The ranks wait for each other"

    def __init__(self, store: Any, attempt: str, size: int) -> None:
        self._store = store
        self.prefix = f"{ROOT}/{attempt}"
        self.size = size

    def announce(self) -> None:
        """Tell launchers which attempt this is; by one rank."""
        self._store.set(NOW, json.dumps([self.prefix.rpartition("/")[2], self.size]))

    @classmethod
    def present(cls, store: Any) -> Notes | None:
        """Those of the run that goes on now; None before it has begun."""
        if not store.check([NOW]):
            return None
        attempt, size = json.loads(store.get(NOW))
        return cls(store, attempt, size)

    def write(self, rank: int, note: Note) -> None:
        self._knock()
        self._store.set(f"{self.prefix}/{rank}", json.dumps(asdict(note)))

    def read(self) -> list[Note]:
        """Of every rank; those that have said nothing are silent."""
        self._knock()
        found = []
        for rank in range(self.size):
            key = f"{self.prefix}/{rank}"
            found.append(Note(**json.loads(self._store.get(key))) if self._store.check([key]) else SILENT)
        return found

    def _knock(self) -> None:
        """Raises an OSError if the store is gone: torch would warn of that, or over a cut cable wait forever."""
        if hasattr(self._store, "port"):  # else it is a file
            socket.create_connection((self._store.host, self._store.port), timeout=1.0).close()

    def end_run(self) -> None:
        """Have all ranks end that ask."""
        self._store.set(f"{self.prefix}/end", "")

    def is_to_end(self) -> bool:
        """Whether a rank has ended the run."""
        self._knock()
        return bool(self._store.check([f"{self.prefix}/end"]))

    def take_turn(self, pause: float) -> bool:
        """Whether nobody else has shown a roll in the last `pause` seconds, so that each is shown once."""
        self._knock()
        key, now = f"{self.prefix}/shown", time.time()
        last = self._store.get(key).decode() if self._store.check([key]) else ""
        if last and now - float(last) < pause:
            return False
        return bool(self._store.compare_set(key, last, str(now)).decode() == str(now))

    def is_first_interrupted(self) -> bool:
        """Whether no other rank shows the roll because the run was interrupted."""
        self._knock()
        return int(self._store.add(f"{self.prefix}/interrupted", 1)) == 1


def in_one_line(notes: Sequence[Note], now: float | None = None) -> str:
    """Who is where: `rank 0 waits in gather (train.py:7) since 61 s; rank 1 ended with code 0`."""
    now = time.time() if now is None else now
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, note in enumerate(notes):
        groups.setdefault((note.kind, note.call, note.line, note.text), []).append(rank)
    parts = []
    for ranks in groups.values():
        note = notes[ranks[0]]
        waited = now - max((notes[rank].since for rank in ranks), default=now)
        many = len(ranks) > 1
        parts.append(f"{_named(ranks)} {_predicate(note, many, waited)}")
    return "; ".join(parts)


def _named(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _predicate(note: Note, many: bool, waited: float) -> str:
    if note.kind == "ended" and note.text:
        return f"ended{how_it_ended(note)}"
    if note.kind == "absent" and note.text:
        return note.text
    one, several = _PREDICATES.get(note.kind, _PREDICATES["silent"])
    return (several if many else one).format(note=note, waited=waited)


def how_it_ended(note: Note) -> str:
    """` with code 3 (train.py:9)`, as far as that is known."""
    code = f" with code {note.text}" if note.text else ""
    return f"{code} ({note.line})" if note.line else code


def was_intended(note: Note) -> bool:
    """Whether a rank that has ended did so without a code that says otherwise."""
    return note.text in _GOOD_CODES


# What is said of one rank, and of several, by the kind of their notes.
_PREDICATES = {
    "waits": (
        "waits in {note.call} ({note.line}) since {waited:.0f} s",
        "wait in {note.call} ({note.line}) since {waited:.0f} s",
    ),
    "runs": ("runs {note.line} ({note.call})", "run {note.line} ({note.call})"),
    "ended": ("has ended", "have ended"),
    "failed": ("failed at {note.line} ({note.text})",) * 2,
    "left": ("has left the group", "have left the group"),
    "moves": ("continues with other collectives", "continue with other collectives"),
    "absent": ("has not come", "have not come"),
    "silent": ("shows no sign of life", "show no sign of life"),
}


# Calls of a training step in which DDP and FSDP talk.
_IN_A_STEP = ("backward", "forward")
EVEN = (
    "loaders returned by `accelerator.prepare` end together, unless `even_batches=False` was asked for or their "
    "datasets differ in length between ranks; for others use `accelerator.join_uneven_inputs`"
)


def likely_reason(notes: Sequence[Note]) -> str:
    """One sentence about what to look for."""
    by_kind: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        by_kind.setdefault(note.kind, []).append(rank)
    if failed := by_kind.get("failed"):
        return f"The others wait for {_named(failed)}, which failed: look at that error first."
    if unintended := [rank for rank in by_kind.get("ended", []) if not was_intended(notes[rank])]:
        how = how_it_ended(notes[unintended[0]])
        return f"The others wait for rank {unintended[0]}, which ended{how}: look there for the reason."
    if ended := sorted(by_kind.get("ended", []) + by_kind.get("left", [])):
        return (
            f"The others wait for {_named(ended)}, which ended before: look for a loop that is shorter there "
            f"({EVEN}), or a call that only some ranks make."
        )
    if absent := by_kind.get("absent"):
        return (
            f"The others wait for {_named(absent)} to join them: look for an `Accelerator()` that only some ranks "
            "make, or for what takes so long before it."
        )
    waiting = [notes[rank] for rank in by_kind.get("waits", [])]
    training = [rank for rank in by_kind.get("waits", []) if notes[rank].call in _IN_A_STEP]
    if training and len(training) < len(waiting):
        beyond = [rank for rank in by_kind["waits"] if rank not in training]
        return (
            f"In a training step, {_named(training)} {'wait' if len(training) > 1 else 'waits'} for {_named(beyond)}, "
            f"which {'have' if len(beyond) > 1 else 'has'} already moved on: look for a collective under a condition "
            f"there, or for a loop with fewer batches ({EVEN})."
        )
    if len({(note.call, note.line) for note in waiting}) > 1:
        stops = "stops at the first such place"
        if parse_flag_from_env("ACCELERATE_DEBUG_MODE"):
            stops = "does not compare calls of `torch.distributed` itself, nor training steps"
        return (
            "Ranks wait in different calls, which the others never make: look for a collective under a "
            "condition such as `if accelerator.is_main_process:`, or in a loop that is longer on some ranks, as with "
            f"`even_batches=False`; `--debug` {stops}."
        )
    busy = by_kind.get("runs") or by_kind.get("moves")
    silent = by_kind.get("silent")
    if busy and silent:
        return (
            f"The others wait for {_named(busy)}, which {'have' if len(busy) > 1 else 'has'} not got there yet, or for "
            f"{_named(silent)}, which {'show' if len(silent) > 1 else 'shows'} no sign of life: stopped, cut off, or "
            "busy with the collectives of another group."
        )
    if silent:
        return (
            f"The others wait for {_named(silent)}, which {'show' if len(silent) > 1 else 'shows'} no sign of life: "
            "check whether a process was killed or stopped, or a machine or the network is down."
        )
    if busy:
        return f"The others wait for {_named(busy)}, which {'have' if len(busy) > 1 else 'has'} not got there yet."
    return "All wait in the same call: check the network between them, and that all ranks pass the same shapes."


def in_full(notes: Sequence[Note]) -> str:
    """With the stacks, for a file."""
    parts = [in_one_line(notes), likely_reason(notes)]
    for rank, note in enumerate(notes):
        if note.stack:
            parts.append(
                f"--- rank {rank} on {note.host} {_predicate(note, False, time.time() - note.since)}\n{note.stack}"
            )
    return "\n".join(parts)
