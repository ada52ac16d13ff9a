"""Finding, checking and loading a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.save import agree
from accelerate.checkpoint.state import Loaded, Run, apply, read
from accelerate.comm import current
from accelerate.errors import CheckpointError

_OF_ONE_RANK = re.compile(r"(?:random_states|progress|gradients)_(\d+)\.\w+")


def verify_checkpoint(path: str | Any) -> dict[str, Any]:
    """Check that a checkpoint is complete and undamaged, file by file.

    Raises `CheckpointError` with the file that is missing or changed. Returns what the manifest says: `world_size`,
    `strategy`, `versions` and `files` (their sizes); of a checkpoint of a 1.x release, which has no manifest, only that
    its files can be found is checked, and `files` alone is returned.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give that of a checkpoint.")
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
            f"{folder} has neither {layout.MANIFEST} nor {layout.random_states(0)}, so it is no complete checkpoint: "
            "load another one."
        )


def newest(project_dir: Path) -> tuple[Path, list[str]]:
    """The newest complete checkpoint of a project, and one sentence for each newer one that is not."""
    passed_over: list[str] = []
    for folder in reversed(layout.automatic_folders(project_dir)):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        return folder, passed_over
    parent = project_dir / layout.CHECKPOINTS
    found = f"none of those in it is complete: {' '.join(passed_over)}" if passed_over else "there is none in it"
    raise CheckpointError(
        f"No checkpoint to load in {parent}, {found}; give the path of one, or start from the beginning."
    )


def load(
    run: Run,
    folder: Path,
    *,
    hooks: Iterable[Callable[[list[Any], str], Any]] = (),
    strict: bool = True,
    verified: bool = False,
    **kwargs: Any,
) -> tuple[Loaded, int]:
    """Load a checkpoint into a run; all or nothing, on all processes. Returns what was read, and how many wrote it.

    hooks: called with the models and the folder; models that a hook takes out of the list are left to it.
    verified: whether the checksums were compared already. kwargs: for `torch.load`.
    """
    failure: Exception | None = None
    loaded: Loaded | None = None
    ranks = run.ranks
    try:
        if current().rank == 0:
            commit.finish_move(folder)
    except Exception as error:
        failure = error
    agree(failure, run.rank)
    models = list(run.models)
    try:
        ranks = _check(folder, run, verified)
    except Exception as error:
        failure = error
    agree(failure, run.rank)
    try:
        for hook in hooks:
            hook(models, str(folder))
        run = replace(run, models=models)
        loaded = read(run, folder, ranks, strict=strict, **kwargs)
    except Exception as error:
        failure = error
    agree(failure, run.rank)
    assert loaded is not None
    try:
        apply(loaded, run)
    except Exception as error:
        failure = error
    agree(failure, run.rank)
    return loaded, ranks


def _check(folder: Path, run: Run, verified: bool) -> int:
    """Raise for damage. Rank 0 looks at what all read, each rank at its own; returns how many ranks wrote it."""
    manifest = Manifest.read(folder)
    if manifest is None:
        _check_without_manifest(folder)
        return len(list(folder.glob(layout.random_states(0).replace("0", "*"))))
    owners = {name: _OF_ONE_RANK.fullmatch(name) for name in manifest.files}
    own = [name for name, owner in owners.items() if (int(owner.group(1)) if owner else 0) == run.rank]
    manifest.check(folder, own, contents=not verified)
    if run.rank < manifest.world_size and layout.random_states(run.rank) not in manifest.files:
        raise CheckpointError(
            f"{folder / layout.random_states(run.rank)} of rank {run.rank} is missing: "
            "this checkpoint was saved on disks that its processes did not share; copy all parts into one folder."
        )
    return manifest.world_size
