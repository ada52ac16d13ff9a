"""Saving a run: all processes write their files, then one of them makes it a checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit, disk, layout
from accelerate.checkpoint.background import Background, Gather
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.host import snapshot
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.state import Part, Run, own_parts, shared_parts, write_parts
from accelerate.comm import current
from accelerate.errors import CheckpointError

Hook = Callable[[list[Any], list[dict[str, Any]], str], Any]


def save(
    run: Run,
    target: Path,
    weights: list[dict[str, Any]],
    *,
    hooks: Iterable[Hook] = (),
    safe: bool = True,
    strategy: str = "NO",
    local_main: bool = True,
    everywhere: bool = False,
    keep: int | None = None,
    background: Background | None = None,
) -> None:
    """Write a checkpoint to `target`. Raises alike on every process, and leaves what was there as it was, if any fails.

    hooks: called with the models, their weights, and the folder that becomes the checkpoint.
    local_main, everywhere: whether this is the first process of its machine, and whether each machine writes all files.
    keep: delete older automatically named checkpoints afterwards, down to this number.
    background: write from copies of everything, there, and return before that is done.
    """
    staging, leads = _stage(target, local_main)
    failure: Exception | None = None
    parts: Iterable[Part] = ()
    try:
        for hook in hooks:
            hook(list(run.models), weights, str(staging))
        if run.rank == 0 or (leads and everywhere):
            parts = shared_parts(run, weights, safe)
        parts = chain(parts, own_parts(run, (run.progress or {}).get("step", 0)))
        if background is not None:
            parts = snapshot(parts, run.device)
    except Exception as error:
        failure = error
    try:
        agree(failure, run.rank)
    except BaseException:
        if leads:
            disk.remove_tree(staging)
        raise

    def finish(gather: Gather) -> None:
        entries = _written(parts, staging, run.rank, leads, gather)
        failure: Exception | None = None
        if leads:
            try:
                commit.publish(staging, target, Manifest(_all_files(staging, entries), run.ranks, strategy))
                if keep is not None:
                    # Only now that the new one is there.
                    commit.prune(layout.automatic_folders(target.parent.parent), keep)
            except Exception as error:
                failure = error
                disk.remove_tree(staging)
        agree(failure, run.rank, gather=gather)

    if background is None:
        finish(current().gather_objects)
    else:
        background.start(finish)


def _written(parts: Iterable[Part], staging: Path, rank: int, leads: bool, gather: Gather) -> dict[str, Entry]:
    """Write this process's files and wait for the others; the entries of them all."""
    entries: dict[str, Entry] = {}
    failure: Exception | None = None
    try:
        entries = write_parts(parts, staging)
    except Exception as error:
        failure = error
    try:
        written = agree(failure, rank, entries, gather=gather)
    except BaseException:
        if leads:
            disk.remove_tree(staging)
        raise
    return {name: entry for others in written for name, entry in others.items()} | entries


def _stage(target: Path, local_main: bool) -> tuple[Path, bool]:
    """The staging folder, and whether this process leads: the first one, and one on each machine that cannot see it."""
    communicator = current()
    failure: Exception | None = None
    answer: list[Any] = [None]
    if communicator.rank == 0:
        try:
            answer = [str(commit.begin(target))]
        except Exception as error:
            failure = error
    agree(failure, communicator.rank)
    communicator.broadcast_objects(answer)
    staging = Path(answer[0])
    leads = communicator.rank == 0
    if communicator.size > 1:
        if local_main and not staging.is_dir():
            leads = True
            try:
                disk.make_folder(staging)
            except Exception as error:
                failure = error
        agree(failure, communicator.rank)
    return staging, leads


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
            found[name] = known[name] if name in known else disk.summed_up(path)
    return found


def agree(failure: Exception | None, rank: int, value: Any = None, gather: Gather | None = None) -> list[Any]:
    """Wait for all processes and return their values; when one has failed, raise on all of them."""
    sentence = None if failure is None else explained(failure, rank)
    answers = (current().gather_objects if gather is None else gather)((sentence, value))
    sentences = [text for text, _ in answers if text is not None]
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
    errno.EACCES: "choose a folder that can be written to",
    errno.EPERM: "choose a folder that can be written to",
}


def explained(error: Exception, rank: int) -> str:
    """One sentence for a person."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        cure = _CURES.get(error.errno or 0, "see to it, or choose another folder")
        wrong = f"Rank {rank} could not write {error.filename} ({error.strerror})"
        return f"{wrong}: what was there before is as it was; {cure}."
    return f"Rank {rank} could not save or load its part ({type(error).__name__}: {error}): see that rank's traceback."
