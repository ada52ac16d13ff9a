"""Where the loops over the loaders of an Accelerator stand: into a checkpoint, and back."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

from accelerate.accelerator.base import AcceleratorBase
from accelerate.checkpoint.agreement import together
from accelerate.checkpoint.run_state import Loaded, load_into
from accelerate.data_loader.position import dataset_to_move
from accelerate.data_loader.snapshot import Snapshot, can_go_on_by_itself, change, other_order
from accelerate.io.torch_format import refused

logger = logging.getLogger(__name__)


def capture(accelerator: AcceleratorBase) -> list[dict[str, Any]]:
    """The position of each prepared loader."""
    return [_capture(accelerator, number) for number in range(len(accelerator._dataloaders))]


def _capture(accelerator: AcceleratorBase, number: int) -> dict[str, Any]:
    """Where a loop over a loader stands, without a state of its dataset that would be refused with all else."""
    loader = accelerator._dataloaders[number]
    position: dict[str, Any] = loader.position.snapshot(loader).state_dict()
    states = {name: position[name] for name in ("dataset", "after", "broken")}
    kind = None if all(state is None for state in states.values()) else refused(states)
    if kind is None:
        return position
    mark = f"dataset of loader {number}"
    if mark not in accelerator._files_looked_at:
        accelerator._files_looked_at.add(mark)
        logger.warning(
            f"The state of the {type(loader.dataset).__name__} of loader {number} holds {kind}, which load_state "
            "would refuse, so it is not saved, and after a load the dataset is read again up to where it was: have "
            "`state_dict` return tensors and plain values."
        )
    return position | dict.fromkeys(states)


def check(accelerator: AcceleratorBase, loaded: Loaded) -> None:
    """Raise if a dataset refuses the state that its next iteration begins with, before anything is loaded.

    Those of worker processes are not asked: that would take workers.
    """
    positions = (loaded.progress or {}).get("loaders", [])
    for number, loader in enumerate(accelerator._dataloaders):
        snapshot = Snapshot.from_state_dict(positions[number]) if number < len(positions) else None
        if loader.num_workers or snapshot is None or not snapshot.inside:
            continue
        by_itself, skips = _way(accelerator, loader, snapshot, loaded.loaders.get(number))
        if by_itself:
            dataset, state = loader.dataset, loaded.loaders[number].get("dataset_state")  # as torchdata calls it
        else:
            dataset, state = dataset_to_move(loader), snapshot.dataset if skips else None
        if state is not None and (twin := _twin(dataset)) is not None:
            load_into(twin, copy.deepcopy(state), f"The state of the dataset of loader {number}")


def _twin(dataset: Any) -> Any:
    """Another dataset with all that this one has, to be tried in its place; None of one that has no such state.

    To give a dataset back what it has told of itself would not do: some begin their next epoch there.
    """
    if not hasattr(dataset, "load_state_dict"):
        return None
    with suppress(TypeError):  # one that Python alone cannot make
        twin = object.__new__(type(dataset))
        twin.__dict__.update(vars(dataset))
        return twin
    return None


def _way(accelerator: AcceleratorBase, loader: Any, snapshot: Snapshot | None, own_state: Any) -> tuple[bool, bool]:
    """Whether a stateful loader goes to its place by itself, and whether a loader is taken there."""
    has_own = own_state is not None and loader.use_stateful_dataloader
    by_itself = has_own and (snapshot is None or can_go_on_by_itself(snapshot, loader))
    return by_itself, not by_itself and (has_own or accelerator.dataloader_config.exact_resume)


def restore(accelerator: AcceleratorBase, positions: list[dict[str, Any]], own_states: dict[int, Any]) -> None:
    """Bring the loaders to where they were, and say what is different now.

    positions: of each loader, as they were captured. own_states: what stateful loaders said of themselves, by number.
    """
    saved = [Snapshot.from_state_dict(position) for position in _agreed(accelerator, positions)]
    if own_states:  # loaded by code of others, which may object on one rank
        together(lambda: _restore(accelerator, saved, own_states))
    else:
        _restore(accelerator, saved, own_states)


def _agreed(accelerator: AcceleratorBase, positions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All must take the same way. Of a dispatched loader only the first process has read the dataset, and it is the
    last one to run out of batches where processes have unequally many."""
    first: list[Any] = [[{name: state.get(name) for name in ("dataset", "inside", "after")} for state in positions]]
    accelerator._communicator.broadcast_objects(first)
    return [{**state, **common} for state, common in zip(positions, first[0], strict=True)]


def _restore(accelerator: AcceleratorBase, saved: list[Snapshot], own_states: dict[int, Any]) -> None:
    loaders, changes = accelerator._dataloaders, []
    lost = [number for number, snapshot in enumerate(saved) if number >= len(loaders) and snapshot.inside]
    if lost and accelerator.is_main_process:
        logger.warning(
            f"The checkpoint holds the positions of {len(saved)} data loaders, but this run has "
            f"{len(loaders)} prepared, so the position of loader {lost[0]} within its epoch is lost: "
            "prepare the same loaders in the same order as in the run that saved, before `load_state`."
        )
    for number, loader in enumerate(loaders):
        snapshot = saved[number] if number < len(saved) else None
        by_itself, skips = _way(accelerator, loader, snapshot, own_states.get(number))
        if by_itself:
            loader.load_state_dict(own_states[number])
        else:
            loader.forget_state()
        if snapshot is None:
            continue
        if other_order(snapshot, loader) is None and (text := change(snapshot, loader)) is not None:
            changes.append(f"loader {number}: {text}")
        loader.position.load(snapshot, loader, skips=skips, by_itself=by_itself)
    if changes and accelerator.is_main_process:
        logger.warning(
            f"The checkpoint is from a run with another number of processes or samples per step; {'; '.join(changes)}."
        )
