"""A whole run as a checkpoint: what `save_state` and `load_state` do."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accelerate.accelerator.base import AcceleratorBase
from accelerate.accumulation import ItemWindow
from accelerate.checkpoint import layout, load
from accelerate.checkpoint.agreement import PATIENCE, on_all_ranks, rendezvous
from accelerate.checkpoint.full_state import packed
from accelerate.checkpoint.run_state import Loaded, LocalRank, Run, fitting, named_parameters
from accelerate.checkpoint.save import save as save_checkpoint
from accelerate.comm import Communicator, current, set_current
from accelerate.data_loader.epoch import Snapshot, change, other_order
from accelerate.data_loader.position import Way
from accelerate.errors import CheckpointError, WrongFolder, a_kind_of, warn
from accelerate.io.torch_format import refused
from accelerate.text import did_you_mean

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)


def save_state(
    accelerator: AcceleratorBase,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    async_save: bool,
    save_model_func_kwargs: dict[str, Any],
) -> Path:
    """See `Accelerator.save_state`."""
    config = accelerator.project_configuration
    if save_model_func_kwargs and not accelerator._strategy.takes_save_arguments and accelerator.is_main_process:
        _say_what_has_no_effect(save_model_func_kwargs)
    if async_save and not accelerator._strategy.can_copy_aside:
        _warn_once(
            "save_state(async_save=True) returns only when the checkpoint is on disk: the state of "
            f"{type(accelerator._strategy).__name__} cannot be copied while training continues."
        )
        async_save = False
    callers = rendezvous().callers(accelerator.gradient_state.backwards) if accelerator._strategy.saves_alone else "all"
    if callers != "late":
        with _only_main() if callers == "alone" else nullcontext():
            target, mid_window = _agreed_target(accelerator, output_dir)
            save_checkpoint(
                _run_of(accelerator),
                target,
                accelerator._strategy,
                capture=lambda run: _capture(accelerator, run, mid_window),
                hooks=accelerator._save_model_state_pre_hook.values(),
                safe=safe_serialization,
                distributed_type=str(accelerator.state.distributed_type.value),
                everywhere=config.save_on_each_node,
                keep=config.total_limit if config.automatic_checkpoint_naming else None,
                background=accelerator._background if async_save else None,
                **save_model_func_kwargs,
            )
    else:
        target = _target(config, output_dir)
        logger.warning(
            f"Rank {accelerator.process_index} reached save_state after the main process had waited {PATIENCE:.0f} s "
            "for it and saved alone, so the checkpoint lacks this rank's random states: call save_state on all ranks "
            "at the same step."
        )
    if config.automatic_checkpoint_naming:
        config.iteration += 1
        accelerator._saves_in = target.parent
    return target


def _say_what_has_no_effect(arguments: Iterable[str]) -> None:
    """Not those of DeepSpeed, which a script may pass whatever engine it runs with."""
    engines = ("tag", "client_state", "save_latest", "exclude_frozen_parameters")
    known = ("output_dir", "safe_serialization", "async_save", *engines)
    unknown = [f"`{name}`{did_you_mean(name, known)}" for name in arguments if name not in engines]
    if unknown:
        warn(f"`save_state` was given {', '.join(unknown)}, which has no effect: leave it out.")


def _agreed_target(accelerator: AcceleratorBase, output_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """Where to save, as the first process sees it, and whether any process has gradients that wait for a step."""
    config = accelerator.project_configuration

    def look() -> tuple[str | None, bool]:
        target = None
        if current().rank == 0:
            target = str(found := _target(config, output_dir))
            _check_unused(found, config, accelerator._saves_in)
        return target, _has_pending_gradients(accelerator)

    answers = on_all_ranks(look)
    return Path(answers[0][0]), any(waiting for _, waiting in answers)


def load_state(
    accelerator: AcceleratorBase,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    load_model_func_kwargs: dict[str, Any],
) -> Path:
    """See `Accelerator.load_state`. Returns what was loaded."""
    config = accelerator.project_configuration
    load.check_map_location(load_model_func_kwargs.pop("map_location", None))
    folder, verified = _agreed_source(accelerator, input_dir)
    loaded = load.load(
        _run_of(accelerator),
        folder,
        accelerator._strategy,
        hooks=accelerator._load_model_state_pre_hook.values(),
        fits=lambda read: _check_positions(accelerator, folder, read),
        verified=verified,
        torch_load=load_kwargs,
        **load_model_func_kwargs,
    )
    _restore_window(accelerator, loaded.progress)
    # The 1.x releases keep it beside the random states.
    accelerator._accumulation.step = (loaded.random_states or {}).get("step", 0)
    _restore_positions(accelerator, loaded)
    if config.automatic_checkpoint_naming and config.project_dir is not None:
        numbers = [layout.automatic_number(path) or 0 for path in layout.automatic_folders(Path(config.project_dir))]
        config.iteration = max([config.iteration, *(number + 1 for number in numbers)])
    logger.info(f"Loaded the checkpoint {folder}.")
    return folder


def _agreed_source(accelerator: AcceleratorBase, input_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """What to load, as the first process sees it, and whether it was checked already."""
    config = accelerator.project_configuration
    folder = on_all_ranks(lambda: _source(config, input_dir), here=current().rank == 0)[0]
    if folder is not None:
        return Path(folder), False
    found, passed_over = load.newest(Path(config.project_dir or ""), _local(accelerator))
    if current().rank == 0:
        for sentence in passed_over:
            logger.warning(f"An incomplete checkpoint is skipped: {sentence}")
    return found, True


def _local(accelerator: AcceleratorBase) -> LocalRank:
    return LocalRank(accelerator.local_process_index, accelerator.state.world.local_size)


def _run_of(accelerator: AcceleratorBase) -> Run:
    communicator = current()
    return Run(
        communicator.rank,
        communicator.size,
        accelerator.state.device_kind,
        models=list(accelerator._models),
        optimizers=[prepared.optimizer for prepared in accelerator._optimizers],
        schedulers=[prepared.scheduler for prepared in accelerator._schedulers if not prepared.saved_by_engine],
        loaders=accelerator._dataloaders,
        custom=accelerator._custom_objects,
        scaler=accelerator.scaler,
        local=LocalRank() if communicator.size == 1 else _local(accelerator),
        looked_at=accelerator._files_looked_at,
    )


def _has_pending_gradients(accelerator: AcceleratorBase) -> bool:
    """Whether there are gradients that wait for a step: inside a window, or in a script that counts by itself."""
    state = accelerator._accumulation.state
    return not state.sync_gradients or any(
        optimizer._backwards_seen != state.backwards
        and accelerator._strategy.has_gradients([p for group in optimizer.param_groups for p in group["params"]])
        for optimizer in accelerator._optimizers
    )


def _capture(accelerator: AcceleratorBase, run: Run, mid_window: bool) -> None:
    """Complete a run with how far it has come."""
    if accelerator.scaler is not None:
        accelerator.scaler.state_dict()  # on every process: an update that is due changes the gradients, too
    progress, run.gradients = _captured_window(accelerator, mid_window)
    loaders = [_captured_position(accelerator, number) for number in range(len(accelerator._dataloaders))]
    run.progress = {**progress, "loaders": loaders}


def _captured_window(
    accelerator: AcceleratorBase, mid_window: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """The counts of the accumulation windows, and in the middle of one (mid_window) the gradients by parameter."""
    accumulation, items, models = accelerator._accumulation, accelerator._items, accelerator._models
    numbers = {id(model): number for number, model in enumerate(models)}
    counts = [
        ([numbers[one] for one in key], count)
        for key, count in accumulation.counts.items()
        if all(one in numbers for one in key)
    ]
    progress = {
        "step": accumulation.step,
        "counts": counts,
        "sync_gradients": accumulation.state.sync_gradients,
        "gradients": mid_window,
        "windows": [(window.items, window.scale, window.closed) for window in items.windows],
        "factors": (items.factor, items._next_factor, items.used),
    }
    if not mid_window:
        return progress, None
    return progress, packed(
        {
            name: parameter.grad.detach()
            for name, parameter in named_parameters(models).items()
            if parameter.grad is not None
        }
    )


def _restore_window(accelerator: AcceleratorBase, progress: dict[str, Any] | None) -> None:
    """Go on inside the window, or start a new one where nothing is known of it."""
    accumulation, items, models = accelerator._accumulation, accelerator._items, accelerator._models
    items.reset()
    accumulation.reset()
    waits = progress is not None and progress["gradients"]
    for optimizer in accelerator._optimizers:
        optimizer._backwards_seen = -1 if waits else accumulation.state.backwards
    if progress is None:
        return
    for numbers, count in progress["counts"]:
        if max(numbers, default=0) < len(models):
            accumulation.counts[tuple(id(models[number]) for number in numbers)] = count
    accumulation.state.sync_gradients = progress["sync_gradients"]
    items.factor, items._next_factor, items.used = progress["factors"]
    items.windows = [ItemWindow(*values) for values in progress["windows"]]


# --- loaders ----------------------------------------------------------------------------------------------------


def _captured_position(accelerator: AcceleratorBase, number: int) -> dict[str, Any]:
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
            f"The state of the {type(loader.dataset).__name__} of loader {number} contains {kind}, which load_state "
            "does not load, so it is not saved; after a load, the dataset is read again up to its position: have "
            "`state_dict` return tensors and plain values."
        )
    return position | dict.fromkeys(states)


def _check_positions(accelerator: AcceleratorBase, folder: Path, loaded: Loaded) -> None:
    """Raise if a loader cannot start where a checkpoint says, before anything is loaded.

    It may have another order now, in which samples would be repeated or lost; which does not matter if no loader
    resumes there, as in a script that only evaluates. Or its dataset may refuse the state that it is going to get.
    """
    positions = (loaded.progress or {}).get("loaders", [])
    for number, (loader, position) in enumerate(zip(accelerator._dataloaders, positions, strict=False)):
        snapshot = Snapshot.from_state_dict(position)
        orders = other_order(snapshot, loader)
        if orders is not None and (loader.position.exact_resume or loader.use_stateful_dataloader):
            raise CheckpointError(
                f"{folder} was saved in the middle of an epoch of loader {number}, in the order of its {orders[0]}, "
                f"but on rank {current().rank} its order now comes from a {orders[1]}: prepare it with the same "
                "`shuffle`, and the same `shuffle` and `use_seedable_sampler` in the DataLoaderConfiguration, as when "
                "it was saved."
            )
        with fitting(loader.part.dataset, f"The state of the dataset of loader {number}"):
            loader.position.check(snapshot, loader, loaded.loaders.get(number))


def _restore_positions(accelerator: AcceleratorBase, loaded: Loaded) -> None:
    """Bring the loaders to where they were, and say what is different now."""
    positions, own_states = (loaded.progress or {}).get("loaders", []), loaded.loaders
    # All must take the same way. Of a dispatched loader only the first process has read the dataset, and it is the
    # last one to run out of batches where processes have unequally many.
    first: list[Any] = [[{name: state.get(name) for name in ("dataset", "inside", "after")} for state in positions]]
    current().broadcast_objects(first)
    saved = [Snapshot.from_state_dict({**state, **common}) for state, common in zip(positions, first[0], strict=True)]
    if own_states:  # what stateful loaders said of themselves: loaded by code of others, which may object on one rank
        on_all_ranks(lambda: _restore_loaders(accelerator, saved, own_states))
    else:
        _restore_loaders(accelerator, saved, own_states)


def _restore_loaders(accelerator: AcceleratorBase, saved: list[Snapshot], own_states: dict[int, Any]) -> None:
    loaders, changes, again = accelerator._dataloaders, [], False
    lost = [number for number, snapshot in enumerate(saved) if number >= len(loaders) and snapshot.inside]
    if lost and accelerator.is_main_process:
        logger.warning(
            f"The checkpoint holds the positions of {len(saved)} data loaders, but this run has "
            f"{len(loaders)} prepared, so the position of loader {lost[0]} within its epoch is lost: "
            "prepare the same loaders in the same order as in the run that saved, before `load_state`."
        )
    for number, loader in enumerate(loaders):
        snapshot = saved[number] if number < len(saved) else None
        text = None if snapshot is None else change(snapshot, loader)
        if text is not None:
            changes.append(f"loader {number}: {text}")
        way = loader.position.load(snapshot, loader, own_states.get(number))
        again |= snapshot is not None and text is not None and snapshot.inside and way is Way.RESTARTS
    if changes and accelerator.is_main_process:
        logger.warning(
            "The checkpoint is from a run with a different number of processes or samples per step; "
            f"{'; '.join(changes)}."
            + _of_schedules(accelerator, saved)
            + (
                " Without `exact_resume`, loaders start this epoch again: leave out what was seen with "
                "`skip_first_batches`, or pass `DataLoaderConfiguration(exact_resume=True)`."
                if again
                else ""
            )
        )


def _of_schedules(accelerator: AcceleratorBase, saved: list[Snapshot]) -> str:
    """What to add where schedules count batches of another size than before."""

    def size(batch: int, processes: int) -> float:
        return batch if accelerator.split_batches else batch / processes

    same = all(
        size(snapshot.batch, snapshot.processes) == size(loader.total_batch_size, loader.num_shards)
        for snapshot, loader in zip(saved, accelerator._dataloaders, strict=False)
    )
    if same or not any(scheduler.step_with_optimizer for scheduler in accelerator._schedulers):
        return ""
    return (
        " Prepared schedulers count batches, which have another size now, so learning rates do not go on as before: "
        "keep the batch_size, which is that of one process, or use `split_batches=True` from the start."
    )


# --- who saves, and where ---------------------------------------------------------------------------------------


@contextmanager
def _only_main() -> Iterator[None]:
    """A context in which the main process talks to nobody: the others are not there."""
    _warn_once(
        "Only the main process called save_state: the checkpoint lacks the random states of the others, and a load "
        "derives new ones for them; call save_state on all processes."
    )
    everybody = current()
    set_current(Communicator())
    try:
        yield
    finally:
        set_current(everybody)


def _target(config: Any, output_dir: str | os.PathLike[str] | None) -> Path:
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise WrongFolder(
                "save_state needs a folder: pass `output_dir`, or a ProjectConfiguration with a `project_dir` and "
                "`automatic_checkpoint_naming=True`."
            )
        return _folder("output_dir", output_dir)
    if config.project_dir is None:
        raise WrongFolder("automatic_checkpoint_naming needs a `project_dir` in the ProjectConfiguration.")
    target = layout.automatic(Path(config.project_dir), config.iteration)
    if output_dir is not None:
        warn(
            f"save_state was given {os.fspath(output_dir)!r}, but automatic_checkpoint_naming=True names the folder: "
            f"the checkpoint is {target}, and counts for `total_limit`. Use `save_model` for weights to keep, or name "
            "all folders yourself."
        )
    return target


def _folder(name: str, given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name} is {given!r}, {a_kind_of(given)}: pass the path of a folder.")
    return Path(os.path.expanduser(given))


def _check_unused(target: Path, config: Any, own: Path | None) -> None:
    """A folder that is named automatically is a new one, and at first (own: not yet) no number before that of others.

    There would be two runs in one project, of which each deletes checkpoints and loads those of the other.
    """
    if not config.automatic_checkpoint_naming:
        return
    others = layout.automatic_folders(Path(config.project_dir)) if own != target.parent else []
    later = [folder for folder in others if (layout.automatic_number(folder) or 0) >= config.iteration]
    if later or target.exists():
        wrong = f"{target} exists already"
        if not target.exists():
            wrong = f"{later[-1]} belongs to another run, but the next checkpoint of this run would be {target.name}"
        raise WrongFolder(
            f"{wrong}: if that run is over, load its last one first (`load_state()`, or `resume()` under `--resume "
            "auto`), or else set "
            "`accelerator.project_configuration.iteration` to the number of the next checkpoint, use another "
            "`project_dir`, or delete what is there."
        )


def _source(config: Any, input_dir: str | os.PathLike[str] | None) -> str | None:
    """The folder to load; None for the newest of the project."""
    if input_dir is not None:
        folder = _folder("input_dir", input_dir)
        if not folder.is_dir():
            saved = [] if config.project_dir is None else layout.automatic_folders(Path(config.project_dir))
            near = next((f" (did you mean `{one}`?)" for one in saved if one.name == folder.name), "")
            there = f" Those of this project are in {saved[0].parent}." if saved else ""
            raise WrongFolder(f"There is no folder {folder}{near}: pass the folder of a checkpoint.{there}")
        return str(folder)
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        raise WrongFolder(
            "load_state without a folder looks for the newest checkpoint of a project: pass `input_dir`, or a "
            "ProjectConfiguration with a `project_dir` and `automatic_checkpoint_naming=True`."
        )
    return None
