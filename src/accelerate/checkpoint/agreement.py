"""Coordinating saves and loads: one at a time, on all ranks or none, in the background if asked for."""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from accelerate.checkpoint import commit
from accelerate.comm import current
from accelerate.errors import CheckpointError, in_words
from accelerate.io.host_memory import HostMemory
from accelerate.per_rank import PerRank, on_this_rank
from accelerate.state import PartialState
from accelerate.torch_internals.process_groups import default_store, kept_connection

if TYPE_CHECKING:
    from accelerate.checkpoint.run_state import LocalRank

T = TypeVar("T")

# How the processes exchange something: the value of each, by rank.
Gather = Callable[[Any], list[Any]]

# Those of all Accelerators of this rank: a notebook may make a second one while the first still writes.
_writing: PerRank[set[threading.Thread]] = PerRank(set)


class Background:
    """Runs one save at a time in a thread. `wait` raises its error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._waited_for = False
        self.memory = HostMemory()

    def start(self, work: Callable[[Gather, Any], None]) -> None:
        """Run `work` in the background. Call it on all ranks, after `wait`."""
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
        """Return when the last save of this rank is on disk. Raises the error of our own save, once."""
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


class _Turn:
    """Whether a rank is saving or loading now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken = False


_turn: PerRank[_Turn] = PerRank(_Turn)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A context for a save or a load: other threads wait, and a signal handler that interrupts it gets an error."""
    turn = _turn.get()
    with turn.lock:
        if turn.taken:
            raise CheckpointError(
                "save_state or load_state was called while another save or load is in progress in the same thread, for "
                "example from a signal handler: set a flag in the handler, and save in the loop."
            )
        turn.taken = True
        try:
            yield
        finally:
            turn.taken = False


def gather_or_raise(
    failure: Exception | None,
    value: Any = None,
    gather: Gather | None = None,
    undo: Callable[[], None] | None = None,
) -> list[Any]:
    """Gather a value from every rank. If one has failed, call `undo` and raise on all of them."""
    refused = None if failure is None else (_kind_for_all(failure), explained(failure, current().rank))
    answers = (current().gather_objects if gather is None else gather)((refused, value))
    refusals = [own for own, _ in answers if own is not None]
    if refusals and undo is not None:
        undo()
    if failure is not None:
        if isinstance(failure, OSError) and refused is not None:
            raise CheckpointError(refused[1]) from failure
        raise failure
    if refusals:
        kind, sentence = refusals[0]
        raise kind(sentence)
    return [own for _, own in answers]


def _kind_for_all(failure: Exception) -> type[CheckpointError]:
    """What the other ranks raise: the same where its sentence says everything, so that they can catch it alike."""
    if isinstance(failure, CheckpointError) and not isinstance(failure, OSError):
        return type(failure)
    return CheckpointError


_CURES = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some space, or choose a folder on another disk",
    errno.EFBIG: "raise the limit on the size of files, or choose a folder on another disk",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that can be read and written to",
    errno.EPERM: "choose a folder that can be read and written to",
}
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def explained(error: Exception, rank: int) -> str:
    """An error as one sentence for the user."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # else all that there is to say is its text
        what = "write" if error.errno in _OF_WRITING else "write or read"
        cure = _CURES.get(error.errno or 0, "fix that, or choose another folder")
        wrong = f"Rank {rank} could not {what} {error.filename or 'a file'} ({error.strerror})"
        return f"{wrong}: earlier checkpoints are unchanged; {cure}."
    return f"Rank {rank} could not save or load its part ({in_words(error)}): see that rank's traceback."


def on_all_ranks(
    work: Callable[[], Any],
    gather: Gather | None = None,
    *,
    here: bool = True,
    undo: Callable[[], None] | None = None,
) -> list[Any]:
    """Call `work` on every rank and gather the results. If one rank fails, all of them raise.

    here: whether this rank has anything to do. undo: called on this rank after any rank has failed.
    """
    if not here:
        return gather_or_raise(None, None, gather)
    failure, value = attempted(work)
    return gather_or_raise(failure, value, gather, undo)


def own_result(work: Callable[[], T]) -> T:
    """The result of something that all processes do; raises on all of them where one fails."""
    result: list[T] = []  # which stays here: the others are only told that there is one
    on_all_ranks(lambda: result.append(work()))
    return result[0]


def attempted(work: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Call `work` on this rank alone. Returns what it has failed with, and what it has returned."""
    try:
        return None, work()
    except Exception as error:
        return error, None


def settle(target: Path, local: LocalRank) -> None:
    """Finish an interrupted replacement of a checkpoint, on all ranks together; or roll it back.

    One that exists on some machines only is rolled back. Rank 0 goes first: ranks that share its disk then find nothing
    to do.
    """
    communicator = current()
    gather, first, local_main = communicator.gather_objects, communicator.rank == 0, local.rank == 0
    if communicator.size == local.size:
        on_all_ranks(lambda: commit.finish_replacement(target), gather, here=first)
        return
    looks = local_main or first
    if all(waiting is None for waiting in on_all_ranks(lambda: commit.pending(target), gather, here=looks)):
        return
    states = on_all_ranks(lambda: (commit.save_in(target), commit.pending(target)), gather, here=looks)
    seen = [state for state in states if state is not None]
    everywhere = {save for save in seen[0] if save is not None and all(save in state for state in seen)}

    def act() -> None:
        (commit.finish_replacement if commit.pending(target) in everywhere else commit.roll_back)(target)

    on_all_ranks(act, gather, here=first)
    on_all_ranks(act, gather, here=local_main and not first)


# How long the main process waits for the first of the others: for once, and where it was known to be alone before.
PATIENCE = 30.0
KNOWN = 1.0
# After so many seconds it says that it waits.
QUIET = 3.0

logger = logging.getLogger(__name__)

Callers = Literal["all", "alone", "late"]


class SaveRendezvous:
    """Finds out whether all ranks call `save_state`, through the store of the process group: a collective would hang.

    Saves that all ranks called are numbered. Rank 0 makes one attempt for each, or several, since it may save alone
    in between, or give up and be called again. For each attempt the store holds how many other ranks are `here`, and
    then what rank 0 has `found`: "all"; "" if they did not come in time; or the number of backwards at which it went on
    alone.

    Rank 0 polls how many have come. The others ask once and wait for the answer: polling by thousands of ranks would
    overload the store. A connection that waits for an answer takes no other request, so they use a separate one.
    """

    def __init__(self) -> None:
        self._number = 0
        self._patience = PATIENCE
        # The last attempt that this process has come to, where it counts once, however often it is called again.
        self._joined: tuple[str, int, int] | None = None

    def callers(self, point: int) -> Callers:
        """Find out who calls this save; to be called at its start.

        point: the progress of the training, equal on ranks that call the same save. "late" is returned to a rank that
        comes to a save which rank 0 has already done alone.
        """
        if current().size == 1:
            return "all"
        prefix = f"accelerate/save/{PartialState._attempt()}/{self._number}"
        if (shared := default_store(prefix)) is None:
            return "all"
        store = kept_connection(shared.timeout, prefix) or shared
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
                    f"Rank 0 waits in save_state for the other processes ({here} of {others} have arrived): all of "
                    f"them should call it; if none has after {self._patience:g} seconds, rank 0 saves alone."
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
        raise _nobody_came(f"{here} of the {others} other ranks arrived")

    def _follow(self, store: Any, point: int) -> Callers:
        attempt = store.add("attempt", 0)
        if attempt and _awaited(store, f"{attempt - 1}/found") == str(point):
            return "late"
        this = PartialState._attempt(), self._number, attempt
        again = self._joined == this
        if not again:
            store.add(f"{attempt}/here", 1)
            self._joined = this
        answer = _Answer(store, f"{attempt}/found")
        for _ in _waiting(store):
            if answer.is_alive():
                continue
            if answer.error is not None:
                raise answer.error
            if answer.text == "all":
                return "all"
            if answer.text or again:  # the main process had just gone on, or given up as this one had before
                return self._follow(store, point)
            break
        raise _nobody_came("the main process or another rank did not call it")


def _awaited(store: Any, key: str) -> str:
    """Wait for a key, and return its value."""
    # A little longer than the process waits: so an error is one of the connection.
    store.wait([key], store.timeout + timedelta(seconds=5))
    return str(store.get(key).decode())


class _Answer(threading.Thread):
    """Waits for a key of a store in a thread, so that the rank can be interrupted meanwhile."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__(name="accelerate-save", daemon=True)
        self.text = ""
        self.error: Exception | None = None
        self._store = store
        self._key = key
        self.start()

    def run(self) -> None:
        try:
            self.text = _awaited(self._store, self._key)
        except (RuntimeError, OSError) as error:
            self.error = error


def _waiting(store: Any) -> Iterator[float]:
    """Yield the seconds waited so far, until the timeout of the process group."""
    started, most = time.monotonic(), store.timeout.total_seconds()
    pause = 0.0002  # most of the time no longer one is needed
    while (waited := time.monotonic() - started) < most:
        yield waited
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _nobody_came(who: str) -> CheckpointError:
    return CheckpointError(
        f"Rank {current().rank} waited in save_state until the timeout of the process group, and {who}: find out what "
        "the other processes are doing, and call save_state on all of them, or only on the main process."
    )


# One per rank, as there is one store.
_rendezvous: PerRank[SaveRendezvous] = PerRank(SaveRendezvous)
rendezvous = _rendezvous.get
