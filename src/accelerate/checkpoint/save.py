"""Saving a run: all ranks write their files, then one rank commits the checkpoint."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.agreement import Background, Gather, one_at_a_time, settle, settle_alone, together
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.parts import Part, StateIO, snapshot, write_parts
from accelerate.checkpoint.run_state import Run, own_parts, shared_parts
from accelerate.comm import current
from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry

Hook = Callable[[list[Any], list[dict[str, Any]], str], Any]


@one_at_a_time()
def save(
    run: Run,
    target: Path,
    strategy: StateIO,
    weights: list[dict[str, Any]],
    *,
    hooks: Iterable[Hook] = (),
    safe: bool = True,
    distributed_type: str = "NO",
    everywhere: bool = False,
    keep: int | None = None,
    background: Background | None = None,
    **kwargs: Any,
) -> None:
    """Write a checkpoint to `target`. If any rank fails, all ranks raise, and what was there stays unchanged.

    strategy: writes models and optimizers. kwargs: for it. distributed_type: its name in the manifest.
    hooks: called with the models, their weights, and the folder that becomes the checkpoint.
    everywhere: whether each machine writes all files.
    keep: delete older automatically named checkpoints afterwards, down to this number.
    background: copy everything, write it there, and return before that is done.
    """
    target = target.absolute()  # a script may go to another folder while this is written behind it
    staging, leads, number, saved = _stage(target, run.local)
    alive = commit.Alive(staging) if leads else None
    parts: list[Iterable[Part]] = []

    def clean_up() -> None:
        if alive is not None:
            alive.stop()
            disk.remove_tree(staging)

    def prepare() -> None:
        try:
            for hook in hooks:
                hook(list(run.models), weights, str(staging))
            main = run.rank == 0 or (leads and everywhere)
            # The strategy first: what all processes write together must not wait for one that has failed before.
            parts.append(strategy.save(run, weights, safe=safe, main=main, **kwargs))
            parts.extend([shared_parts(run, main), own_parts(run, (run.progress or {}).get("step", 0))])
            if background is not None:
                parts[:] = [snapshot(chain(*parts), background.memory)]
        except OSError as error:
            if error.strerror:  # where a hook has written, to a file that it alone knows
                error.filename = error.filename or str(target)
            raise

    try:
        together(prepare)
    except BaseException:
        clean_up()
        raise

    def finish(gather: Gather | None = None, group: Any = None) -> None:
        try:
            own: dict[str, FileEntry] = {}

            def write() -> dict[str, FileEntry]:
                own.update(write_parts(chain(*parts), staging, group))
                # Only who leads needs them, and its own are the longest: a checksum for each block of a whole model,
                # which all would get, and as much again for each of the others.
                return {} if leads else own

            known = {name: entry for others in together(write, gather) for name, entry in others.items()} | own
            manifest = Manifest({}, run.ranks, distributed_type, number, saved)
            together(
                lambda: _publish(staging, target, manifest, known),
                gather,
                here=leads,
                undo=lambda: commit.withdraw(target, number),
            )
            # It is there on all machines: now it may replace what was there before, and old ones may go.
            together(lambda: _replace(target, keep), gather, here=leads)
        finally:
            clean_up()

    if background is None:
        finish()
    else:
        background.start(finish)


def _publish(staging: Path, target: Path, manifest: Manifest, known: dict[str, FileEntry]) -> None:
    commit.publish(staging, target, replace(manifest, files=_all_files(staging, known)))


def _replace(target: Path, keep: int | None) -> None:
    commit.settle(target, everywhere=True)
    if keep is not None:
        others = [folder for folder in commit.oldest_first(target.parent.parent) if folder != target]
        commit.prune(others, keep - 1)


def _stage(target: Path, local: tuple[int, int]) -> tuple[Path, bool, str, float]:
    """The staging folder; whether this rank leads (rank 0, and one rank on each machine without its folder); and
    the id and the time of this save."""
    communicator = current()
    gather, leads = communicator.gather_objects, communicator.rank == 0
    alone = communicator.size == local[1]
    if not alone:
        settle(target, local)

    def begin() -> tuple[str, str, float]:
        if alone:
            settle_alone(target)  # here, to save the processes one exchange
        staging = commit.staging_for(target)
        commit.begin(staging)
        return str(staging.relative_to(target.parent)), uuid.uuid4().hex, commit.time_of_saving(target)

    answer = together(begin, gather, here=leads)[0]
    staging = target.parent / answer[0]
    if not alone:
        elsewhere = local[0] == 0 and not leads and not staging.is_dir()
        together(lambda: commit.begin(staging), gather, here=elsewhere)
        leads = leads or elsewhere
    return staging, leads, answer[1], answer[2]


def _all_files(folder: Path, known: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Every file of the staging folder. Those that hooks wrote are flushed and checksummed here."""
    found: dict[str, FileEntry] = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if name == layout.MANIFEST:
                continue
            if name not in known:
                with open(path, "rb") as file:
                    disk.sync(file.fileno())
            found[name] = known[name] if name in known else blocks.summed_up(path)
    return found
