"""Finding, checking and loading a checkpoint."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.agreement import attempted, explained, gather_or_raise, on_all_ranks, one_at_a_time, settle
from accelerate.checkpoint.layout import Manifest, files_since
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import (
    Loaded,
    LocalRank,
    Run,
    StagedLoad,
    StateIO,
    apply_objects,
    apply_random_states,
    past_undoing,
    read_objects,
)
from accelerate.comm import current
from accelerate.constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from accelerate.errors import CheckpointError, MissingFile

logger = logging.getLogger(__name__)


def verify_checkpoint(path: str | Any) -> dict[str, Any]:
    """Check that a checkpoint is complete and undamaged, file by file.

    Args:
        path: the folder of the checkpoint.

    Returns:
        The contents of the manifest: `world_size`, `strategy`, `versions` and `files` (their sizes). A checkpoint of a
        1.x release has no manifest: it is only checked that its files exist, and only `files` is returned.

    Raises:
        CheckpointError: a file is missing or changed.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: pass the folder of a checkpoint.")
    committed = folder / layout.COMMITTED
    if (new := Manifest.read(committed)) is not None:  # its move into place was broken off; a load finishes it
        for name in new.files:
            new.check(committed if (committed / name).exists() else folder, [name])
        return _described(new)
    manifest = Manifest.read(folder)
    if manifest is None:
        _check_without_manifest(folder)
        return {"files": {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file()}}
    manifest.check(folder)
    return _described(manifest)


def _described(manifest: Manifest) -> dict[str, Any]:
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    return {
        "world_size": manifest.world_size,
        "strategy": manifest.strategy,
        "versions": manifest.versions,
        "files": sizes,
    }


def _check_without_manifest(folder: Path) -> None:
    if not (folder / layout.random_states(0)).exists():
        raise CheckpointError(
            f"{folder} has neither {layout.MANIFEST} nor {layout.random_states(0)}, so it is not a complete "
            f"checkpoint: {_instead(folder)}."
        )


def _instead(folder: Path) -> str:
    """What to do with a folder that is not a checkpoint."""
    if inner := layout.automatic_folders(folder) or layout.numbered_folders(folder):
        return f"its checkpoints are in {inner[0].parent}; pass one of them, or call `load_state()` without a folder"
    if any((folder / name).exists() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        return "it has the weights of a model only; load them with `load_checkpoint_in_model`"
    return "load another one"


def check_map_location(map_location: Any) -> None:
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f'map_location is {map_location!r}: pass "cpu", "on_device" or None.')


def newest(project_dir: Path, local: LocalRank) -> tuple[Path, list[str]]:
    """The newest complete checkpoint of a project, and one sentence for each newer one that is not.

    Called on all ranks: where machines share no disk, it must exist on each of them.
    local: the local rank and the local world size.
    """
    communicator = current()
    first = communicator.rank == 0
    passed_over: list[str] = []
    found = commit.oldest_first(project_dir) if first else []
    folders = communicator.gather_objects([str(folder) for folder in reversed(found)])[0]
    for folder in map(Path, folders):
        wrong = None
        apart = _apart(folder, local)
        try:
            if first or (apart and local.rank == 0):
                verify_checkpoint(folder)
        except Exception as error:
            wrong = explained(error, communicator.rank)
        sentences = [answer for answer in communicator.gather_objects(wrong) if answer is not None]
        if not sentences:
            return folder, passed_over
        passed_over.append(sentences[0])
    parent = project_dir / layout.CHECKPOINTS
    nothing = (
        f"None of the checkpoints in {parent} is complete ({' '.join(passed_over).rstrip('.')})"
        if passed_over
        else f"There is no checkpoint in {parent}"
    )
    raise MissingFile(f"{nothing}: pass the path of one, or start from the beginning.")


def _apart(folder: Path, local: LocalRank) -> bool:
    """Whether this machine has its own copy of the folder, on a disk that it does not share with rank 0."""
    communicator = current()
    if communicator.size == local.size:
        return False
    marks = communicator.gather_objects(commit.mark(folder))
    return bool(marks[communicator.rank] is None or marks[communicator.rank] != marks[0])


@one_at_a_time()
def load(
    run: Run,
    folder: Path,
    strategy: StateIO,
    *,
    hooks: Iterable[Callable[[list[Any], str], Any]] = (),
    fits: Callable[[Loaded], None] = lambda loaded: None,
    verified: bool = False,
    torch_load: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Loaded:
    """Load a checkpoint into a run, all or nothing, on all ranks. Returns what was read.

    strategy: reads models and optimizers. kwargs: for it. torch_load: arguments for `torch.load`.
    hooks: called with the models and the folder; a hook loads the models that it removes from the list.
    fits: raises if what was read does not fit. verified: whether the checksums have been compared already.
    """
    hooks = list(hooks)
    end = time.monotonic() + _PATIENCE
    for attempt in itertools.count(1):
        try:
            loaded, loads = _read(run, folder, strategy, hooks, fits, verified, torch_load or {}, kwargs)
            break
        except _ReplacedMeanwhile as error:
            # By the clock of the first process, so that all go on or none.
            if current().gather_objects(attempt >= _ATTEMPTS and time.monotonic() > end)[0]:
                raise CheckpointError(str(error)) from None
    undo = ExitStack()

    def apply_fallible() -> None:
        for staged in loads:
            staged.apply_fallible(undo)

    def apply_in_place() -> None:
        with past_undoing(folder):
            for staged in loads:
                staged.apply_in_place()
            apply_random_states(loaded, run)

    # Where one process refuses, all keep what they have.
    on_all_ranks(lambda: apply_objects(loaded, run, undo), undo=undo.close)
    on_all_ranks(apply_fallible, undo=undo.close)
    undo.pop_all()  # nobody objects any more: the copies may go
    on_all_ranks(apply_in_place)
    return loaded


def _read(
    run: Run,
    folder: Path,
    strategy: StateIO,
    hooks: list[Callable[[list[Any], str], Any]],
    fits: Callable[[Loaded], None],
    verified: bool,
    torch_load: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Loaded, list[StagedLoad]]:
    """Read and check everything, changing nothing in the run except what hooks change."""
    settle(folder, run.local)
    began = commit.mark(folder)
    apart = _apart(folder, run.local)
    manifest, names, sentence = _list(folder, run.rank, apart)
    reader = CheckpointReader(folder, share=run.local)
    loaded: list[Loaded] = []

    def check() -> tuple[str | None, bool]:
        if sentence is not None:
            raise CheckpointError(sentence)
        if names is not None:
            reader.know(names)
        if manifest is not None:
            _check(folder, manifest, run, reader, verified, at_once=bool(hooks), apart=apart)
        _check_custom(run, reader)
        loaded.append(read_objects(run, reader, **torch_load))
        fits(loaded[0])
        return None if manifest is None else manifest.save, bool(hooks)

    answers = _on_all_ranks_unless_replaced(check, folder, began, _ReplacedMeanwhile)
    saves, hooked = [save for save, _ in answers], any(has_hooks for _, has_hooks in answers)
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"On rank {saves.index(next(s for s in saves if s != saves[0]))}, {folder} holds a different checkpoint "
            "than on rank 0: load one that all machines have, or copy it to all of them."
        )
    if run.rank == 0 and not run.models and (reader.has(layout.model(0, True)) or reader.has(layout.model(0, False))):
        logger.warning(f"{folder} holds weights, but no model is prepared for them: call `load_state` after `prepare`.")
    run = replace(run, saved_ranks=_saved_ranks(reader, manifest))
    loads: list[StagedLoad] = []

    def stage(models: list[Any], optimizers: list[Any]) -> None:
        some = replace(run, models_to_load=models, optimizers_to_load=optimizers)
        # The weights before an optimizer, which may look at them when it loads.
        loads.insert(0, strategy.load(some, reader, torch_load=torch_load, **kwargs))

    def stage_models() -> None:
        models = list(run.models)
        for hook in hooks:
            hook(models, str(folder))
        stage(models, [] if hooked else run.optimizers)
        if manifest is not None:  # what was read in another way, or by nobody
            manifest.check(folder, reader.unchecked)

    if hooked:
        # Optimizers are left to no hook: where they do not fit, none is called, which might change a model.
        on_all_ranks(lambda: stage([], run.optimizers))
    _on_all_ranks_unless_replaced(stage_models, folder, began, CheckpointError if hooked else _ReplacedMeanwhile)
    return loaded[0], loads


class _ReplacedMeanwhile(CheckpointError):
    """Another run has saved to the folder meanwhile, so it can be read again."""


# A folder that another run replaces again and again is given up after so many attempts and seconds.
_ATTEMPTS = 10
_PATIENCE = 60.0


def _on_all_ranks_unless_replaced(
    work: Callable[[], Any], folder: Path, began: Any, kind: type[CheckpointError]
) -> list[Any]:
    """Like `on_all_ranks`, but raises `kind` if another run has saved to the folder since reading began.

    A file that was replaced meanwhile would look damaged, and small files are read after they were checked.
    """
    failure, value = attempted(work)
    # In this order: a move of files that ends between the two questions has left another manifest.
    changed = commit.is_being_replaced(folder) or commit.mark(folder) != began
    if any(current().gather_objects(changed)):
        raise kind(
            f"{folder} was replaced by another run while it was being read, so nothing was loaded: load it again."
        )
    return gather_or_raise(failure, value)


def _list(folder: Path, rank: int, apart: bool) -> tuple[Manifest | None, list[str] | None, str | None]:
    """The manifest of a folder, the names of its files, and one sentence on why they cannot be read.

    The names are None if every file in it belongs to the checkpoint. The manifest grows with the number of ranks that
    saved. So rank 0 reads it and broadcasts it, except to machines with their own copy of the folder (apart).
    """
    found: tuple[Manifest | None, list[str] | None, str | None] = None, None, None
    if rank == 0 or apart:
        try:
            if (manifest := Manifest.read(folder)) is not None:
                found = manifest, list(manifest.files), None
            else:
                _check_without_manifest(folder)
                found = None, files_since(folder) if (folder / layout.MANIFEST).exists() else None, None
        except Exception as error:
            found = None, None, explained(error, rank)
    told = [found]
    current().broadcast_objects(told)
    return found if apart else told[0]


def _check(
    folder: Path, manifest: Manifest, run: Run, reader: CheckpointReader, verified: bool, at_once: bool, apart: bool
) -> None:
    """Raise for damaged files. Rank 0 checks those that all ranks read, and each rank its own.

    apart: whether this machine has its own copy, which its local rank 0 checks.

    Weights and optimizers are checked by the reader while it reads them; or here (at_once), if hooks will change
    something before that.
    """
    leads = run.rank == 0 or (apart and run.local.rank == 0)
    owners = {name: layout.rank_of(name) for name in manifest.files}
    own = [name for name, of in owners.items() if (leads if of is None else of % run.ranks == run.rank)]
    large = [name for name in manifest.files if layout.WHOLE.fullmatch(name)]
    manifest.check(folder, own, contents=False)
    manifest.check(folder, large, contents=False)
    if not verified:
        manifest.check(folder, set(own) - set(large))
        if not at_once:
            reader.unchecked |= {name: manifest.files[name] for name in large}
        elif run.local.rank == 0:
            manifest.check(folder, large)
    if run.rank < manifest.world_size and layout.random_states(run.rank) not in manifest.files:
        raise CheckpointError(
            f"{folder / layout.random_states(run.rank)} of rank {run.rank} is missing: "
            "the processes that saved this checkpoint did not share a disk; copy all parts into one folder."
        )


def _check_custom(run: Run, reader: CheckpointReader) -> None:
    saved = list(itertools.takewhile(reader.has, map(layout.custom, itertools.count())))
    if len(saved) != len(run.custom):
        files = ", ".join(saved) if len(saved) > len(run.custom) else f"{layout.custom(len(saved))} is missing"
        raise CheckpointError(
            f"{reader.folder} has the states of {len(saved)} registered objects ({files}), but "
            f"{len(run.custom)} are registered here: call register_for_checkpointing with the same objects, in the "
            "same order, as when it was saved."
        )


def _saved_ranks(reader: CheckpointReader, manifest: Manifest | None) -> int:
    if manifest is not None:
        return manifest.world_size
    return sum(map(reader.has, (path.name for path in reader.folder.glob(layout.random_states(0).replace("0", "*")))))
