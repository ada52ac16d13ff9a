"""Processes that save or load together: one at a time, all of them or none, and one error told to all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit
from accelerate.checkpoint.background import Gather
from accelerate.comm import current
from accelerate.errors import CheckpointError, in_words
from accelerate.per_rank import PerRank


class _Turn:
    """Whose turn it is to save or to load on a rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken = False


_turn: PerRank[_Turn] = PerRank(_Turn)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A context for a save or a load: other threads wait, and a handler of signals that comes between is told so."""
    turn = _turn.get()
    with turn.lock:
        if turn.taken:
            raise CheckpointError(
                "A checkpoint is being saved or loaded, and another save or load came between in the same thread, as "
                "from a signal handler: set a flag in the handler, and save in the loop."
            )
        turn.taken = True
        try:
            yield
        finally:
            turn.taken = False


def agree(
    failure: Exception | None,
    rank: int,
    value: Any = None,
    gather: Gather | None = None,
    undo: Callable[[], None] | None = None,
) -> list[Any]:
    """Wait for all processes and return their values; when one has failed, raise on all of them, after `undo`."""
    sentence = None if failure is None else explained(failure, rank)
    answers = (current().gather_objects if gather is None else gather)((sentence, value))
    sentences = [text for text, _ in answers if text is not None]
    if sentences and undo is not None:
        undo()
    if failure is not None:
        if isinstance(failure, OSError):
            raise CheckpointError(sentence) from failure
        raise failure
    if sentences:
        raise CheckpointError(sentences[0])
    return [own for _, own in answers]


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
    """One sentence for a person."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # else all that there is to say is its text
        what = "write" if error.errno in _OF_WRITING else "write or read"
        cure = _CURES.get(error.errno or 0, "see to it, or choose another folder")
        wrong = f"Rank {rank} could not {what} {error.filename or 'a file'} ({error.strerror})"
        return f"{wrong}: what was there before is as it was; {cure}."
    return f"Rank {rank} could not save or load its part ({in_words(error)}): see that rank's traceback."


def together(
    work: Callable[[], Any],
    gather: Gather | None = None,
    *,
    here: bool = True,
    undo: Callable[[], None] | None = None,
) -> list[Any]:
    """Do something on every process and wait for the others; what each has returned, or the error of one on all.

    here: whether this process has anything to do. undo: what it does when one has failed, and all know of it.
    """
    failure: Exception | None = None
    value = None
    try:
        if here:
            value = work()
    except Exception as error:
        failure = error
    return agree(failure, current().rank, value, gather=gather, undo=undo if here else None)


def settle(target: Path, local: tuple[int, int]) -> None:
    """Finish, or take back, a replacement that was broken off; on all processes together.

    One that is there on some machines only is taken back. The first process goes first: where the others share its
    disk they find nothing left to do. local: which of how many processes of its machine this one is.
    """
    communicator = current()
    gather, first, local_main = communicator.gather_objects, communicator.rank == 0, local[0] == 0
    if communicator.size == local[1]:
        together(lambda: settle_alone(target), gather, here=first)
        return
    looks = local_main or first
    if all(waiting is None for waiting in together(lambda: commit.pending(target), gather, here=looks)):
        return
    states = together(lambda: (commit.current(target), commit.pending(target)), gather, here=looks)
    seen = [state for state in states if state is not None]
    everywhere = {save for save in seen[0] if save is not None and all(save in state for state in seen)}

    def act() -> None:
        commit.settle(target, everywhere=commit.pending(target) in everywhere)

    together(act, gather, here=first)
    together(act, gather, here=local_main and not first)


def settle_alone(target: Path) -> None:
    """Where there is one machine, what is there is there everywhere."""
    if commit.pending(target) is not None:
        commit.settle(target, everywhere=True)
