"""Saving a run: all processes write their files, then one of them makes it a checkpoint."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit, disk, layout, stream
from accelerate.checkpoint.background import Background, Gather
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.parts import Engine, Part, snapshot, write_parts
from accelerate.checkpoint.state import Run, in_words, own_parts, shared_parts
from accelerate.comm import current
from accelerate.errors import CheckpointError
from accelerate.per_rank import PerRank

Hook = Callable[[list[Any], list[dict[str, Any]], str], Any]


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


@one_at_a_time()
def save(
    run: Run,
    target: Path,
    engine: Engine,
    weights: list[dict[str, Any]],
    *,
    hooks: Iterable[Hook] = (),
    safe: bool = True,
    strategy: str = "NO",
    everywhere: bool = False,
    keep: int | None = None,
    background: Background | None = None,
    **kwargs: Any,
) -> None:
    """Write a checkpoint to `target`. Raises alike on every process, and leaves what was there as it was, if any fails.

    engine: writes models and optimizers. kwargs: for it.
    hooks: called with the models, their weights, and the folder that becomes the checkpoint.
    everywhere: whether each machine writes all files.
    keep: delete older automatically named checkpoints afterwards, down to this number.
    background: write from copies of everything, there, and return before that is done.
    """
    target = target.absolute()  # a script may go to another folder while this is written behind it
    staging, leads, number, saved = _stage(target, run.local)
    alive = commit.Alive(staging) if leads else None
    failure: Exception | None = None
    parts: Iterable[Part] = ()

    def clean_up() -> None:
        if alive is not None:
            alive.stop()
            disk.remove_tree(staging)

    try:
        for hook in hooks:
            hook(list(run.models), weights, str(staging))
        main = run.rank == 0 or (leads and everywhere)
        # The engine first: what all processes write together must not wait for one that has failed before.
        parts = engine.save(run, weights, safe=safe, main=main, **kwargs)
        parts = chain(parts, shared_parts(run, main), own_parts(run, (run.progress or {}).get("step", 0)))
        if background is not None:
            parts = snapshot(parts, background.memory)
    except Exception as error:
        failure = error
        if isinstance(error, OSError) and error.strerror:  # where a hook has written, to a file that it alone knows
            error.filename = error.filename or str(target)
    except BaseException:
        clean_up()
        raise
    try:
        agree(failure, run.rank)
    except BaseException:
        clean_up()
        raise

    def finish(gather: Gather, group: Any = None) -> None:
        try:
            entries = _together(lambda: write_parts(parts, staging, group), gather)
            known = {name: entry for others in entries for name, entry in others.items()} | entries[run.rank]
            manifest = Manifest({}, run.ranks, strategy, number, saved)
            _together(
                lambda: _publish(staging, target, manifest, known),
                gather,
                here=leads,
                undo=lambda: commit.withdraw(target, number),
            )
            # It is there on all machines: now it may replace what was there before, and old ones may go.
            _together(lambda: _replace(target, keep), gather, here=leads)
        finally:
            clean_up()

    if background is None:
        finish(current().gather_objects)
    else:
        background.start(finish)


def _together(
    work: Callable[[], Any], gather: Gather, *, here: bool = True, undo: Callable[[], None] | None = None
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


def _publish(staging: Path, target: Path, manifest: Manifest, known: dict[str, Entry]) -> None:
    commit.publish(staging, target, replace(manifest, files=_all_files(staging, known)))


def _replace(target: Path, keep: int | None) -> None:
    commit.settle(target, everywhere=True)
    if keep is not None:
        others = [folder for folder in commit.oldest_first(target.parent.parent) if folder != target]
        commit.prune(others, keep - 1)


def settle(target: Path, local: tuple[int, int]) -> None:
    """Finish, or take back, a replacement that was broken off; on all processes together.

    One that is there on some machines only is taken back. The first process goes first: where the others share its
    disk they find nothing left to do. local: which of how many processes of its machine this one is.
    """
    communicator = current()
    gather, first, local_main = communicator.gather_objects, communicator.rank == 0, local[0] == 0
    if communicator.size == local[1]:
        _together(lambda: _settle_alone(target), gather, here=first)
        return
    states = _together(lambda: (commit.current(target), commit.pending(target)), gather, here=local_main or first)
    seen = [state for state in states if state is not None]
    if all(waiting is None for _, waiting in seen):
        return
    everywhere = {save for save in seen[0] if save is not None and all(save in state for state in seen)}

    def act() -> None:
        commit.settle(target, everywhere=commit.pending(target) in everywhere)

    _together(act, gather, here=first)
    _together(act, gather, here=local_main and not first)


def _settle_alone(target: Path) -> None:
    """Where there is one machine, what is there is there everywhere."""
    if commit.pending(target) is not None:
        commit.settle(target, everywhere=True)


def _stage(target: Path, local: tuple[int, int]) -> tuple[Path, bool, str, float]:
    """The staging folder; whether this process leads (the first, and one on each machine that cannot see it); and the
    number and the time of this save."""
    communicator = current()
    gather, leads = communicator.gather_objects, communicator.rank == 0
    alone = communicator.size == local[1]
    if not alone:
        settle(target, local)

    def begin() -> tuple[str, str, float]:
        if alone:
            _settle_alone(target)  # here, to save the processes one exchange
        staging = commit.staging_for(target)
        commit.begin(staging)
        return str(staging.relative_to(target.parent)), uuid.uuid4().hex, commit.time_of_saving(target)

    answer = _together(begin, gather, here=leads)[0]
    staging = target.parent / answer[0]
    if not alone:
        elsewhere = local[0] == 0 and not leads and not staging.is_dir()
        _together(lambda: commit.begin(staging), gather, here=elsewhere)
        leads = leads or elsewhere
    return staging, leads, answer[1], answer[2]


def _all_files(folder: Path, known: dict[str, Entry]) -> dict[str, Entry]:
    """Every file of the staging folder: those of hooks are summed up, and put on the disk for good, here."""
    found: dict[str, Entry] = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if name == layout.MANIFEST:
                continue
            if name not in known:
                with open(path, "rb") as file:
                    disk.sync(file.fileno())
            found[name] = known[name] if name in known else stream.summed_up(path)
    return found


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
