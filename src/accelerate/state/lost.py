"""When a run of several processes breaks, say who is missing, who had ended, and which rank failed first.

What torch raises then is about the connection ("timed out", "connection reset"), on every rank that is still there. So
each rank that ends with an error leaves a note in the store through which the ranks met, and one whose error is about
the connection reads the notes of the others and adds a line to its traceback. Those who have ended without an error are
known to the watch.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from accelerate.comm import Communicator
from accelerate.diagnosis import watch as hang
from accelerate.diagnosis.place import at_line
from accelerate.diagnosis.roll import EVEN, Note, how_it_ended, was_intended
from accelerate.environments import World
from accelerate.torch_internals.process_groups import default_store

ROLL_CALL_SECONDS = 3.0
_COURTESY_SECONDS = 1.0
# The note of the first rank that said why: for the others to find at once, without reading those of all.
_CAUSE = "accelerate/cause"

# How the errors of a broken connection read, in gloo, NCCL and torch's store, and of a save that another rank broke.
_SIGNS = (
    "Connection closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Read error",
    "NCCL",
    "Socket",
    "see that rank's traceback",  # of `checkpoint/agreement.py`: what a save raises on ranks that had no part in it
)

# What to do about errors that torch raises: how they read, and the line that is added, since theirs are about torch's
# classes.
_PREPARED = "accelerate: `prepare` has wrapped this model in DistributedDataParallel: "
_HANDLER = "`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({}=True)])`"
_LOST_WORKER = (
    "accelerate: a worker of this DataLoader was killed, most often because memory ran out: try fewer workers "
    "(`num_workers`), or a smaller `prefetch_factor`."
)
_REMEDIES = {
    "'DistributedDataParallel' object has no attribute": _PREPARED
    + "your attributes and methods are those of `accelerator.unwrap_model(model)`; for the loss, call `model(...)`.",
    "Expected to have finished reduction in the prior iteration": _PREPARED
    + f"to train with parameters that a loss may leave out, pass {_HANDLER.format('find_unused_parameters')}.",
    "Expected to mark a variable ready only once": _PREPARED
    + "if it checkpoints activations, let it do so with `use_reentrant=False`; if its graph is the same in every step, "
    + f"pass {_HANDLER.format('static_graph')}.",
    "is killed by signal: Killed": _LOST_WORKER,
    "exited unexpectedly": _LOST_WORKER,
}


@dataclass
class Watch:
    rank: int
    machines: list[str]  # of each rank
    store: Any
    notes: dict[int, str] = field(default_factory=dict)
    ended: dict[int, Note] = field(default_factory=dict)  # ranks whose program has come to its end
    asking: bool = False  # a question to the store is under way, or has failed

    def leave_note(self, text: str) -> None:
        self.asking = True
        note = json.dumps([time.time(), text])
        self.store.set(f"accelerate/note/{self.rank}", note)
        if text and not self.store.check([_CAUSE]):
            self.store.set(_CAUSE, json.dumps([self.rank, note]))

    def read_notes(self) -> None:
        """Collect the notes of the others, until all are there or time is up."""
        limit = time.monotonic() + ROLL_CALL_SECONDS
        waiting = [rank for rank in range(len(self.machines)) if rank != self.rank]
        while waiting and not self._is_explained() and time.monotonic() < limit:
            for rank in list(waiting):
                self.asking = True
                if self.store.check([f"accelerate/note/{rank}"]):
                    self.notes[rank] = self.store.get(f"accelerate/note/{rank}").decode()
                    waiting.remove(rank)
                self.asking = False
            time.sleep(0.1)
        # A launcher ends all ranks when the first of them has ended: that should be the one with the cause.
        time.sleep(_COURTESY_SECONDS)

    def _is_explained(self) -> bool:
        """Whether somebody has said why: what the others will say is that they have lost contact, too."""
        if self.store.check([_CAUSE]):
            rank, note = json.loads(self.store.get(_CAUSE))
            self.notes[rank] = note
            return True
        watching = hang.current()
        notes = [] if watching is None else watching.everybody()
        self.ended = {rank: note for rank, note in enumerate(notes) if note.kind in ("ended", "left")}
        return any(json.loads(note)[1] for note in self.notes.values()) or bool(self.ended)


_watch: Watch | None = None


def watch(world: World, communicator: Communicator) -> None:
    """Have an error that ends this process say who is missing. Called on all ranks at once."""
    global _watch
    machine = _name_of_this_machine(world)
    alone = world.local_size == world.size
    machines = [machine] * communicator.size if alone else communicator.gather_objects(machine)
    store = default_store()
    if store is None:
        return
    if _watch is None:
        _chain(sys.excepthook)
    _watch = Watch(world.rank, machines, store)


def _chain(previous: Any) -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        line = None if interrupted else told(error, trace)
        previous(kind, error, trace)
        if line and sys.version_info < (3, 11):
            print(line, file=sys.stderr, flush=True)

    sys.excepthook = hook


def told(error: BaseException, trace: TracebackType | None) -> str | None:
    """Tell the others of an error that ends this process. Returns the line that is added to it: about those who have
    caused it, or what to do.
    """
    if _watch is None:
        return None
    line = explain(_watch, error, trace) or _remedy(error)
    if line and sys.version_info >= (3, 11):
        error.add_note(line)  # wherever the traceback is shown or written, the line is its last
    return line


def _remedy(error: BaseException) -> str | None:
    if not isinstance(error, (AttributeError, RuntimeError)):
        return None
    text = str(error)
    return next((line for sign, line in _REMEDIES.items() if sign in text), None)


def is_about_others(text: str) -> bool:
    """Whether the text of an error is what is left of one on another rank."""
    return any(sign in text for sign in _SIGNS)


def explain(watch: Watch, error: BaseException, trace: TracebackType | None = None) -> str | None:
    """Tell the others of this error; if it is about the connection to them, one sentence about who broke it."""
    about_others = isinstance(error, RuntimeError) and is_about_others(str(error))
    watching = hang.current()
    if watching is not None and not about_others:
        watching.failed(error, trace)

    def call_the_roll() -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0] + at_line(trace)
        with suppress(RuntimeError, OSError):  # the store is gone: what has been collected so far is all there is
            watch.leave_note("" if about_others else text)
            if about_others:
                watch.read_notes()

    # In a thread that is given up if it does not come back: over a cut cable the store answers with silence.
    thread = threading.Thread(target=call_the_roll, daemon=True)
    thread.start()
    thread.join(ROLL_CALL_SECONDS + 0.5)
    return _sentence(watch) if about_others else None


def _sentence(watch: Watch) -> str | None:
    here = f"Rank {watch.rank} on {watch.machines[watch.rank]}"
    notes = {rank: json.loads(note) for rank, note in watch.notes.items()}
    causes = sorted((when, rank, text) for rank, (when, text) in notes.items() if text)
    if causes:
        _, rank, text = causes[0]
        return f"{here} was stopped by an error of rank {rank} on {watch.machines[rank]}, which reads: {text}"
    if ended := watch.ended:
        several = len(ended) > 1
        ways = {how_it_ended(note) for note in ended.values()}
        how = ways.pop() if len(ways) == 1 else ""
        reason = "look there for the reason"
        if all(map(was_intended, ended.values())):
            reason = f"look for a loop that is shorter there ({EVEN}), or a call that only some ranks make"
        return (
            f"{here} needed rank{'s' * several} {', '.join(map(str, ended))}, which had ended already{how}: {reason}."
        )
    missing = [rank for rank in range(len(watch.machines)) if rank != watch.rank and rank not in notes]
    if watch.asking:
        # The store is gone, and rank 0 with it: nothing can be said about the others.
        missing = [rank for rank in missing if watch.machines[rank] == watch.machines[0]]
    if not missing:
        return None
    where: dict[str, list[str]] = {}
    for rank in missing:
        where.setdefault(watch.machines[rank], []).append(str(rank))
    lost = "; ".join(f"{machine} (rank {', '.join(ranks)})" for machine, ranks in where.items())
    return (
        f"{here} has lost contact with {lost}: look there for a process that was killed, a machine that went down or a "
        "broken network; the error above is only the consequence."
    )


def _name_of_this_machine(world: World) -> str:
    """Its name, and the address from which it reaches the place where the ranks meet."""
    name = socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((world.address, world.port))  # sends nothing
            return f"{name} ({probe.getsockname()[0]})"
    except OSError:
        return name
