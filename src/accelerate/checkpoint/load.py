"""Finding, checking and loading a checkpoint."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.agreement import agree, explained, one_at_a_time, settle
from accelerate.checkpoint.manifest import Manifest, files_since
from accelerate.checkpoint.parts import Engine, Put
from accelerate.checkpoint.reading import Reader
from accelerate.checkpoint.state import (
    Loaded,
    Run,
    apply_loaders,
    apply_objects,
    apply_random_states,
    in_words,
    read,
)
from accelerate.comm import current
from accelerate.data_loader.position import other_order
from accelerate.errors import CheckpointError, MissingFile

logger = logging.getLogger(__name__)

# What each rank has written by itself, also into folders that all of them write together.
_OF_ONE_RANK = re.compile(
    r"(?:random_states_|progress_|gradients_|\w+/__|\w+/(?:bf16_)?zero_pp_rank_)(\d+)(?:_\d+|_mp_rank_\w+)?\.\w+"
)


def verify_checkpoint(path: str | Any) -> dict[str, Any]:
    """Check that a checkpoint is complete and undamaged, file by file.

    Raises `CheckpointError` with the file that is missing or changed. Returns what the manifest says: `world_size`,
    `strategy`, `versions` and `files` (their sizes); of a checkpoint of a 1.x release, which has no manifest, only that
    its files can be found is checked, and `files` alone is returned.
    """
    folder = Path(path).expanduser()
    _find(folder)
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


def _find(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give that of a checkpoint.")


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
            f"{folder} has neither {layout.MANIFEST} nor {layout.random_states(0)}, so it is no complete checkpoint: "
            "load another one."
        )


def check_map_location(map_location: Any) -> None:
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f'map_location is {map_location!r}: give "cpu", "on_device" or None.')


def newest(project_dir: Path, local: tuple[int, int]) -> tuple[Path, list[str]]:
    """The newest complete checkpoint of a project, and one sentence for each newer one that is not.

    Called on all processes: where machines share no disk, it must be there on each of them.
    local: which of how many processes of its machine this one is.
    """
    communicator = current()
    first = communicator.rank == 0
    passed_over: list[str] = []
    found = commit.oldest_first(project_dir) if first else []
    folders = agree(None, communicator.rank, [str(folder) for folder in reversed(found)])[0]
    for folder in map(Path, folders):
        wrong = None
        apart = _apart(folder, local)
        try:
            if first or (apart and local[0] == 0):
                verify_checkpoint(folder)
        except Exception as error:
            wrong = explained(error, communicator.rank)
        sentences = [answer for answer in agree(None, communicator.rank, wrong) if answer is not None]
        if not sentences:
            return folder, passed_over
        passed_over.append(sentences[0])
    parent = project_dir / layout.CHECKPOINTS
    nothing = (
        f"none of those in it is complete: {' '.join(passed_over).rstrip('.')}"
        if passed_over
        else "there is none in it"
    )
    raise MissingFile(
        f"No checkpoint to load in {parent}, {nothing}; give the path of one, or start from the beginning."
    )


def _apart(folder: Path, local: tuple[int, int]) -> bool:
    """Whether this machine has another folder of that name than the first process, on a disk of its own."""
    communicator = current()
    if communicator.size == local[1]:
        return False
    marks = agree(None, communicator.rank, commit.mark(folder))
    return bool(marks[communicator.rank] is None or marks[communicator.rank] != marks[0])


@one_at_a_time()
def load(
    run: Run,
    folder: Path,
    engine: Engine,
    *,
    hooks: Iterable[Callable[[list[Any], str], Any]] = (),
    verified: bool = False,
    torch_load: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Loaded:
    """Load a checkpoint into a run; all or nothing, on all processes. Returns what was read.

    engine: reads models and optimizers. kwargs: for it. torch_load: arguments for `torch.load`.
    hooks: called with the models and the folder; models that a hook takes out of the list are left to it.
    verified: whether the checksums were compared already.
    """
    hooks = list(hooks)
    end = time.monotonic() + _PATIENCE
    for attempt in itertools.count(1):
        try:
            loaded, puts = _read(run, folder, engine, hooks, verified, torch_load or {}, kwargs)
            break
        except _Replaced as error:
            # By the clock of the first process, so that all go on or none.
            if agree(None, run.rank, attempt >= _ATTEMPTS and time.monotonic() > end)[0]:
                raise CheckpointError(str(error)) from None
    failure: Exception | None = None
    undo = ExitStack()
    try:
        apply_objects(loaded, run, undo)
    except Exception as error:
        failure = error
    agree(failure, run.rank, undo=undo.close)  # where one process refuses, all keep what they have
    try:
        for put in puts:
            put.first(undo)
    except Exception as error:
        failure = error
    agree(failure, run.rank, undo=undo.close)
    undo.pop_all()  # nobody objects any more: the copies may go
    try:
        for put in puts:
            put.rest()
        apply_loaders(loaded, run)
        apply_random_states(loaded, run)
    except Exception as error:
        failure = error if engine.can_roll_back else _half_loaded(folder, error)
    agree(failure, run.rank)
    return loaded


def _half_loaded(folder: Path, error: Exception) -> CheckpointError:
    failure = CheckpointError(
        f"{folder} was loaded in part before it failed ({in_words(error)}), and this engine cannot undo that: load "
        "another checkpoint before training goes on, or start again."
    )
    failure.__cause__ = error
    return failure


def _read(
    run: Run,
    folder: Path,
    engine: Engine,
    hooks: list[Callable[[list[Any], str], Any]],
    verified: bool,
    torch_load: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Loaded, list[Put]]:
    """Read and check everything; nothing of the run is changed but what hooks change."""
    failure: Exception | None = None
    loaded: Loaded | None = None
    puts: list[Put] = []
    manifest: Manifest | None = None
    settle(folder, run.local)
    began = commit.mark(folder)
    apart = _apart(folder, run.local)
    models = list(run.models)
    reader = Reader(folder, share=run.local)
    listed, sentence = _list(folder, run.rank, apart)
    try:
        if sentence is not None:
            raise CheckpointError(sentence)
        manifest = listed.manifest
        if listed.names is not None:
            reader.know(listed.names)
        if manifest is not None:
            _check(folder, manifest, run, reader, verified, at_once=bool(hooks), apart=apart)
        _check_custom(run, reader)
        loaded = read(run, reader, **torch_load)
        _check_orders(run, reader, loaded)
    except Exception as error:
        failure = error
    _see_that_it_is_the_same(folder, began, run.rank, _Replaced)
    answers = agree(failure, run.rank, (None if manifest is None else manifest.save, bool(hooks)))
    saves, hooked = [save for save, _ in answers], any(has_hooks for _, has_hooks in answers)
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"{folder} holds another checkpoint for rank {saves.index(next(s for s in saves if s != saves[0]))} than "
            "for rank 0: load one that all machines have, or copy it to all of them."
        )
    if run.rank == 0 and not run.models and (reader.has(layout.model(0, True)) or reader.has(layout.model(0, False))):
        logger.warning(f"{folder} holds weights, which nobody takes: call `load_state` after `prepare`.")
    run = replace(run, saved_ranks=_saved_ranks(reader, manifest))
    if hooked:
        # Optimizers are left to no hook: where they do not fit, none is called, which might change a model.
        try:
            puts.append(engine.load(run, reader, torch_load=torch_load, **kwargs))
        except Exception as error:
            failure = error
        agree(failure, run.rank)
    try:
        for hook in hooks:
            hook(models, str(folder))
        rest = replace(run, without_hooks=models, optimizers=[] if hooked else run.optimizers, to_follow=run.optimizers)
        puts.insert(0, engine.load(rest, reader, torch_load=torch_load, **kwargs))
        if manifest is not None:  # what was read in another way, or by nobody
            manifest.check(folder, reader.unchecked)
    except Exception as error:
        failure = error
    _see_that_it_is_the_same(folder, began, run.rank, CheckpointError if hooked else _Replaced)
    agree(failure, run.rank)
    assert loaded is not None
    return loaded, puts


class _Replaced(CheckpointError):
    """Another run has saved to the folder meanwhile; what is there now can be read."""


# Who saves to a folder without a pause gets to know it, after so many attempts to read it in so many seconds.
_ATTEMPTS = 10
_PATIENCE = 60.0


def _see_that_it_is_the_same(folder: Path, began: Any, rank: int, kind: type[CheckpointError]) -> None:
    """Raise, on all processes, if another run has saved to the folder since its files began to be read.

    A file that was replaced meanwhile looks damaged, and small ones are read after they were checked.
    """
    changed = commit.mark(folder) != began or commit.is_being_replaced(folder)
    if any(agree(None, rank, changed)):
        raise kind(f"{folder} was replaced by another run while it was read, and nothing was loaded: load it again.")


class _Listed(NamedTuple):
    """What a folder holds: the names of its files are None where all files in it count."""

    manifest: Manifest | None = None
    names: list[str] | None = None


def _list(folder: Path, rank: int, apart: bool) -> tuple[_Listed, str | None]:
    """What is in a folder, or one sentence on why that cannot be told.

    It is the longer the more processes have saved. So of those that see the same folder only the first one reads it,
    and tells the others. apart: whether this machine has a copy of its own.
    """
    found: tuple[_Listed, str | None] = _Listed(), None
    if rank == 0 or apart:
        try:
            found = _listed(folder), None
        except Exception as error:
            found = _Listed(), explained(error, rank)
    told = [found]
    current().broadcast_objects(told)
    return found if apart else told[0]


def _listed(folder: Path) -> _Listed:
    manifest = Manifest.read(folder)
    if manifest is not None:
        return _Listed(manifest, list(manifest.files))
    _check_without_manifest(folder)
    return _Listed(None, files_since(folder) if (folder / layout.MANIFEST).exists() else None)


def _check(
    folder: Path, manifest: Manifest, run: Run, reader: Reader, verified: bool, at_once: bool, apart: bool
) -> None:
    """Raise for damage. Rank 0 looks at what all read, each rank at its own.

    apart: whether this machine has a copy of its own, at which its first process looks.

    Weights and optimizers are left to the reader, which compares them while it reads them; at_once: or compared here,
    since hooks are going to change something before they are read.
    """
    leads = run.rank == 0 or (apart and run.local[0] == 0)
    owners = {name: _OF_ONE_RANK.fullmatch(name) for name in manifest.files}
    own = [name for name, of in owners.items() if (int(of.group(1)) % run.ranks == run.rank if of else leads)]
    large = [name for name in manifest.files if layout.WHOLE.fullmatch(name)]
    manifest.check(folder, own, contents=False)
    manifest.check(folder, large, contents=False)
    if not verified:
        manifest.check(folder, set(own) - set(large))
        if not at_once:
            reader.unchecked |= {name: manifest.files[name] for name in large}
        elif run.local[0] == 0:
            manifest.check(folder, large)
    if run.rank < manifest.world_size and layout.random_states(run.rank) not in manifest.files:
        raise CheckpointError(
            f"{folder / layout.random_states(run.rank)} of rank {run.rank} is missing: "
            "this checkpoint was saved on disks that its processes did not share; copy all parts into one folder."
        )


def _check_custom(run: Run, reader: Reader) -> None:
    saved = list(itertools.takewhile(reader.has, map(layout.custom, itertools.count())))
    if len(saved) != len(run.custom):
        files = ", ".join(saved) if len(saved) > len(run.custom) else f"{layout.custom(len(saved))} is missing"
        raise CheckpointError(
            f"{reader.folder} has the states of {len(saved)} registered objects ({files}), and "
            f"{len(run.custom)} are registered here: call register_for_checkpointing with the same objects, in the "
            "same order, as when it was saved."
        )


def _check_orders(run: Run, reader: Reader, loaded: Loaded) -> None:
    """The middle of an epoch is a place in one order: in another one samples would come twice, or not at all.

    That is no matter where no loader goes there: its epoch begins anew, as that of a script which only evaluates.
    """
    places = (loaded.progress or {}).get("loaders", [])
    for number, (loader, place) in enumerate(zip(run.loaders, places, strict=False)):
        orders = other_order(place, loader)
        if orders is not None and (run.exact_resume or loader.use_stateful_dataloader):
            raise CheckpointError(
                f"{reader.folder} was saved in the middle of an epoch of loader {number} in the order of its "
                f"{orders[0]}, and on rank {run.rank} it is now that of a {orders[1]}: prepare it with the `shuffle`, "
                "and the `shuffle` and `use_seedable_sampler` of the DataLoaderConfiguration, that it had then."
            )


def _saved_ranks(reader: Reader, manifest: Manifest | None) -> int:
    if manifest is not None:
        return manifest.world_size
    return sum(map(reader.has, (path.name for path in reader.folder.glob(layout.random_states(0).replace("0", "*")))))
