"""Saving a run: all ranks write their parts of it, then one rank commits the checkpoint."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.agreement import Background, Gather, on_all_ranks, one_at_a_time, own_result, settle
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.parts import File, Part, copied, write_parts
from accelerate.checkpoint.run_state import PROGRESS, LocalRank, Run, StateIO
from accelerate.comm import current
from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry
from accelerate.io.torch_format import refused
from accelerate.random import capture_random_states

logger = logging.getLogger(__name__)

Hook = Callable[[list[Any], list[dict[str, Any]], str], Any]


@one_at_a_time()
def save(
    run: Run,
    target: Path,
    strategy: StateIO,
    *,
    capture: Callable[[Run], None] = lambda run: None,
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
    capture: completes the run with its progress and gradients, if it has any.
    hooks: called with the models, their weights, and the folder that becomes the checkpoint.
    everywhere: whether each machine writes all files.
    keep: delete older automatically named checkpoints afterwards, down to this number.
    background: copy everything, write it there, and return before that is done.
    """
    target = target.absolute()  # a script may go to another folder while this is written behind it
    staging, leads, save_id, save_time = _stage(target, run.local)
    alive = commit.Alive(staging) if leads else None

    def clean_up() -> None:
        if alive is not None:
            alive.stop()
            disk.remove_tree(staging)

    def prepare() -> Iterable[Part]:
        try:
            capture(run)
            weights = strategy.weights(run.models)
            for hook in hooks:
                hook(list(run.models), weights, str(staging))
            main = run.rank == 0 or (leads and everywhere)
            # The strategy first: what all processes do together must not wait for one that has failed before.
            engine = strategy.save(run, weights, safe=safe, main=main, **kwargs)
            return chain(engine, shared_parts(run, main), own_parts(run, (run.progress or {}).get("step", 0)))
        except OSError as error:
            if error.strerror:  # where a hook has written, to a file that it alone knows
                error.filename = error.filename or str(target)
            raise

    try:
        parts = own_result(prepare)
        if background is not None:  # only when nobody has refused: what is copied may have to be gathered first
            parts = own_result(lambda: copied(parts, background.memory))
    except BaseException:
        clean_up()
        raise

    def finish(gather: Gather | None = None, group: Any = None) -> None:
        try:
            own: dict[str, FileEntry] = {}

            def write() -> dict[str, FileEntry]:
                own.update(write_parts(parts, staging, group))
                # Only who leads needs them, and its own are the longest: a checksum for each block of a whole model,
                # which all would get, and as much again for each of the others.
                return {} if leads else own

            known = {name: entry for others in on_all_ranks(write, gather) for name, entry in others.items()} | own

            def publish() -> None:
                manifest = Manifest(_all_files(staging, known), run.ranks, distributed_type, save_id, save_time)
                commit.publish(staging, target, manifest)

            on_all_ranks(publish, gather, here=leads, undo=lambda: commit.withdraw(target, save_id))
            # It is there on all machines: now it may replace what was there before, and old ones may go.
            on_all_ranks(lambda: _replace(target, keep), gather, here=leads)
        finally:
            clean_up()

    if background is None:
        finish()
    else:
        background.start(finish)


def _replace(target: Path, keep: int | None) -> None:
    commit.finish_replacement(target)
    if keep is not None:
        others = [folder for folder in commit.oldest_first(target.parent.parent) if folder != target]
        commit.prune(others, keep - 1)


def _stage(target: Path, local: LocalRank) -> tuple[Path, bool, str, float]:
    """The staging folder; whether this rank leads (rank 0, and one rank on each machine without its folder); and
    the id and the time of this save."""
    communicator = current()
    gather, leads = communicator.gather_objects, communicator.rank == 0
    one_machine = communicator.size == local.size
    if not one_machine:
        settle(target, local)

    def begin() -> tuple[str, str, float]:
        if one_machine:
            commit.finish_replacement(target)  # here, to save the processes one exchange
        staging = commit.staging_for(target)
        commit.begin(staging)
        return str(staging.relative_to(target.parent)), uuid.uuid4().hex, commit.time_of_saving(target)

    answer = on_all_ranks(begin, gather, here=leads)[0]
    staging = target.parent / answer[0]
    if not one_machine:
        elsewhere = local.rank == 0 and not leads and not staging.is_dir()
        on_all_ranks(lambda: commit.begin(staging), gather, here=elsewhere)
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


# --- the parts of a run that no engine writes -------------------------------------------------------------------


def shared_parts(run: Run, main: bool) -> Iterator[File]:
    """The parts that are the same on all ranks. main: whether this rank writes them."""
    # Objects of the script's own are asked on all processes, since they may have to ask each other.
    for number, item in enumerate(run.custom):
        file = File(layout.custom(number), item.state_dict())
        if main:
            _warn_if_unloadable(file, item, run.looked_at)
            yield file
    if not main:
        return
    for number, scheduler in enumerate(run.schedulers):
        file = File(layout.scheduler(number), scheduler.state_dict())
        _warn_if_unloadable(file, scheduler, run.looked_at)
        yield file
    for number, loader in enumerate(run.loaders):
        if getattr(loader, "use_stateful_dataloader", False):
            yield File(layout.stateful_loader(number), loader.state_dict())
    if run.scaler is not None:
        yield File(layout.scaler(), run.scaler.state_dict())


def _warn_if_unloadable(file: File, item: Any, looked_at: set[str]) -> None:
    """Warn once for an object whose state can be saved but not loaded."""
    if file.name in looked_at:
        return
    looked_at.add(file.name)
    if (kind := refused(file.content)) is not None:
        logger.warning(
            f"{file.name}: the state of {type(item).__name__} contains {kind}, which load_state will not load, "
            "because it runs no code from files: have `state_dict` return tensors and plain values, call "
            "`torch.serialization.add_safe_globals` with the class before it is loaded, or load it with "
            "`load_kwargs={'weights_only': False}`."
        )


def own_parts(run: Run, step: int = 0) -> Iterator[File]:
    """The parts of this rank alone: one file, since there may be thousands of ranks.

    The progress gets a second file if it contains what 1.x releases refuse, since they would refuse the whole file.
    step: the accumulation step, as older releases store it.
    """
    one_file = run.progress is not None and _is_known_to_1_x(run.progress)
    progress = {PROGRESS: run.progress} if one_file else {}
    yield File(layout.random_states(run.rank), {"step": step, **capture_random_states(run.device), **progress})
    if run.progress is not None and not one_file:
        yield File(layout.progress(run.rank), run.progress)


_PLAIN = {type(None), bool, int, float, str, bytes, torch.Tensor}


def _is_known_to_1_x(value: Any) -> bool:
    """Whether 1.x releases can read this: tensors, plain values, and arrays as in NumPy's random states."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return all(map(_is_known_to_1_x, value)) and all(map(_is_known_to_1_x, value.values()))
    if kind in (list, tuple):
        return all(map(_is_known_to_1_x, value))
    return kind is np.ndarray and value.dtype == np.uint32
