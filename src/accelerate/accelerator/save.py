"""Saving: models, files, and whole runs to go on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accelerate.accelerator import progress
from accelerate.accelerator.base import AcceleratorBase
from accelerate.checkpoint import layout, load
from accelerate.checkpoint.callers import PATIENCE, meeting
from accelerate.checkpoint.files import refused
from accelerate.checkpoint.save import agree
from accelerate.checkpoint.save import save as save_checkpoint
from accelerate.checkpoint.state import Run
from accelerate.checkpoint.weights import Coming, save_weights
from accelerate.comm import Communicator, current, set_current
from accelerate.data_loader.position import change, takes_over
from accelerate.errors import WrongFolder
from accelerate.files import save

logger = logging.getLogger(__name__)


class Saving(AcceleratorBase):
    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The model as it was before `prepare`.

        keep_fp32_wrapper: leave mixed precision in its forward. keep_torch_compile: leave it compiled.
        """
        return self._strategy.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; unwrap: with the names it had before `prepare`."""
        return self._strategy.state_dict(model, unwrap=unwrap)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once (or once per machine, if the project configuration says so).

        safe_serialization: write a dict of tensors as safetensors.
        """
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model, for others to load.

        max_shard_size: weights that are larger are spread over several files, with an index beside them.
        safe_serialization: safetensors, where a tensor with several names is stored once; otherwise torch files.
        """
        described = self._strategy.coming(model) if safe_serialization else None
        weights = self.get_state_dict(model) if described is None else Coming(*described, max_shard_size)
        everywhere = self.project_configuration.save_on_each_node
        failure: Exception | None = None
        if self.is_local_main_process if everywhere else self.is_main_process:
            try:
                save_weights(weights, Path(save_directory), max_shard_size, safe_serialization)
            except Exception as error:
                failure = error
        if isinstance(weights, Coming):
            weights.finish()
            agree(failure, self.process_index)
        else:  # nobody is asked: a script may call this on the main process alone
            agree(failure, self.process_index, gather=lambda own: [own])

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything that training needs to go on: models, optimizers, schedulers, loaders, random states.

        The checkpoint is complete or not there at all: whatever happens on the way, the one before stays as it was.
        With `automatic_checkpoint_naming` it goes to `checkpoints/checkpoint_<n>` in the project's folder, and the
        oldest ones beyond `total_limit` are deleted after that. Call it on all processes. Returns the folder.

        safe_serialization: weights as safetensors; otherwise as torch files.
        async_save: return as soon as everything is copied to the host, and write behind the training. The checkpoint is
        that of this moment, and is there when it is complete; what goes wrong is raised by the next save, by
        `wait_for_checkpoint` or by `end_training`.
        save_model_func_kwargs: for engines that have something to choose here; one device and DDP have not.
        """
        config = self.project_configuration
        self._communicator.verify("save_state", None)
        self.wait_for_checkpoint()
        if async_save and not self._strategy.can_snapshot:
            _say_that_it_waits(type(self._strategy).__name__)
            async_save = False
        callers = meeting().callers(self.gradient_state.backwards) if self._strategy.saves_alone else "all"
        if callers != "late":
            with _only_main() if callers == "alone" else nullcontext():
                target = self._save(output_dir, safe_serialization, async_save, save_model_func_kwargs)
        else:
            target = _target(config, output_dir)
            logger.warning(
                f"Rank {self.process_index} came to save_state when the main process had waited for {PATIENCE:.0f} s "
                "and gone on alone: its random states are not in the checkpoint; have all come at the same time."
            )
        if config.automatic_checkpoint_naming:
            config.iteration += 1
            self._saves_in = target.parent
        return target

    def _save(self, output_dir: Any, safe_serialization: bool, async_save: bool, kwargs: dict[str, Any]) -> Path:
        config = self.project_configuration
        target, inside = self._agreed_target(output_dir)
        if self.scaler is not None:
            self.scaler.state_dict()  # on every process: an update that is due changes the gradients, too
        state, gradients = progress.capture(self._models, self._accumulation, self._items, inside)
        state["loaders"] = [self._place_in(number) for number in range(len(self._dataloaders))]
        save_checkpoint(
            self._run(state, gradients),
            target,
            self._strategy,
            self._strategy.weights(self._models),
            hooks=self._save_model_state_pre_hook.values(),
            safe=safe_serialization,
            strategy=str(self.distributed_type.value),
            everywhere=config.save_on_each_node,
            keep=config.total_limit if config.automatic_checkpoint_naming else None,
            background=self._background if async_save else None,
            **kwargs,
        )
        return target

    def _place_in(self, number: int) -> dict[str, Any]:
        """Where a loop over a loader stands, without a state of its dataset that would be refused with all else."""
        loader = self._dataloaders[number]
        place: dict[str, Any] = loader.position.state_dict(loader)
        states = {name: place.get(name) for name in ("dataset", "after", "broken")}
        kind = None if all(state is None for state in states.values()) else refused(states)
        if kind is None:
            return place
        mark = f"dataset of loader {number}"
        if mark not in self._files_looked_at:
            self._files_looked_at.add(mark)
            logger.warning(
                f"The state of the {type(loader.dataset).__name__} of loader {number} holds {kind}, which load_state "
                "would refuse, so it is not saved, and the dataset is read again up to its place after a load: have "
                "`state_dict` return tensors and plain values."
            )
        return place | dict.fromkeys(states)

    def wait_for_checkpoint(self) -> None:
        """Return when the last `save_state(async_save=True)` is on the disk; raise what it failed with."""
        self._background.wait()

    def end_training(self) -> None:
        """Finish the checkpoint that is being written, and then whatever else has to end with the training."""
        try:
            self.wait_for_checkpoint()
        finally:
            super().end_training()  # type: ignore[misc]

    def _agreed_target(self, output_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
        """Where to save, as the first process sees it, and whether any process has gradients that wait for a step."""
        config = self.project_configuration
        failure: Exception | None = None
        target: str | None = None
        if self.is_main_process:
            try:
                target = str(_free(_target(config, output_dir), config, self._saves_in))
            except Exception as error:
                failure = error
        inside = progress.pending(self._accumulation, self._optimizers)
        answers = agree(failure, self.process_index, (target, inside))
        return Path(answers[0][0]), any(waiting for _, waiting in answers)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on from a checkpoint: call it after `prepare`, on all processes, with the objects that were saved.

        Everything is read and checked before anything is changed, and nothing that is in a file is run.
        Without a path, under `automatic_checkpoint_naming`, the newest complete checkpoint of the project is taken.
        On another number of processes than it was saved on, new ones get random states derived from the first one's.

        load_kwargs: for `torch.load`. load_model_func_kwargs: for the `load_state_dict` of models; `strict=False` takes
        weights whose names do not all fit. `map_location` ("cpu", "on_device") may be among them: in the end everything
        is where it was before.
        """
        config = self.project_configuration
        load.check_map_location(load_model_func_kwargs.pop("map_location", None))
        self._communicator.verify("load_state", None)
        self.wait_for_checkpoint()
        folder, verified = self._agreed_source(input_dir)
        loaded = load.load(
            self._run(),
            folder,
            self._strategy,
            hooks=self._load_model_state_pre_hook.values(),
            verified=verified,
            torch_load=load_kwargs,
            **load_model_func_kwargs,
        )
        progress.restore(loaded.progress, self._models, self._optimizers, self._accumulation, self._items)
        self._accumulation.step = (loaded.random_states or {}).get("step", 0)
        self._restore_positions((loaded.progress or {}).get("loaders", []))
        if config.automatic_checkpoint_naming and config.project_dir is not None:
            numbers = [
                layout.automatic_number(path) or 0 for path in layout.automatic_folders(Path(config.project_dir))
            ]
            config.iteration = max([config.iteration, *(number + 1 for number in numbers)])
        logger.info(f"Loaded the checkpoint {folder}.")

    def _restore_positions(self, states: list[dict[str, Any]]) -> None:
        """Bring the loaders to where they were, and say what is different now."""
        # All must take the same way. Of a dispatched loader only the first process has read the dataset, and it is the
        # last one to run out of batches where processes have unequally many.
        first: list[Any] = [[{name: state.get(name) for name in ("dataset", "inside", "after")} for state in states]]
        self._communicator.broadcast_objects(first)
        states = [{**state, **common} for state, common in zip(states, first[0], strict=True)]
        lost = [number for number, state in enumerate(states) if number >= len(self._dataloaders) and state["inside"]]
        if lost and self.is_main_process:
            logger.warning(
                f"The checkpoint holds the places of {len(states)} loaders and there are {len(self._dataloaders)} "
                f"prepared ones, so that of loader {lost[0]}, inside an epoch, is lost: prepare each loader once, in "
                "the order of then, before `load_state`."
            )
        changes = []
        for number, (loader, state) in enumerate(zip(self._dataloaders, states, strict=False)):
            if (text := change(state, loader)) is not None:
                changes.append(f"loader {number}: {text}")
            # A stateful loader leaves out what was seen by itself, where it can.
            stateful = loader.use_stateful_dataloader
            skip = takes_over(state, loader) if stateful else self.dataloader_config.exact_resume
            loader.position.load_state_dict(state, loader, skip=skip)
        if changes and self.is_main_process:
            logger.warning(f"The checkpoint was saved on another set-up; {'; '.join(changes)}.")

    def _agreed_source(self, input_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
        """What to load, as the first process sees it, and whether it was checked already."""
        config = self.project_configuration
        failure: Exception | None = None
        folder: str | None = None
        if self.is_main_process:
            try:
                folder = _source(config, input_dir)
            except Exception as error:
                failure = error
        folder = agree(failure, self.process_index, folder)[0]
        if folder is not None:
            return Path(folder), False
        found, passed_over = load.newest(Path(config.project_dir or ""), self._local)
        if self.is_main_process:
            for sentence in passed_over:
                logger.warning(f"An incomplete checkpoint is passed over: {sentence}")
        return found, True

    @property
    def _local(self) -> tuple[int, int]:
        """Which of how many processes of its machine this one is."""
        return self.local_process_index, self.state.world.local_size

    def _run(self, state: dict[str, Any] | None = None, gradients: dict[str, torch.Tensor] | None = None) -> Run:
        alone = current().size == 1
        return Run(
            self.process_index,
            1 if alone else self.num_processes,
            self.state.device_kind,
            models=list(self._models),
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            custom=self._custom_objects,
            scaler=self.scaler,
            progress=state,
            local=(0, 1) if alone else self._local,
            gradients=gradients,
            looked_at=self._files_looked_at,
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too: anything with `state_dict` and `load_state_dict`, in this order."""
        wrong = [
            type(item).__name__
            for item in objects
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing was given {', '.join(wrong)}: what is saved with a checkpoint needs both "
                "`state_dict` and `load_state_dict`."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, weights, folder)` called in `save_state`, before anything else is written there.

        What it takes out of `weights` is left to it. The folder becomes the checkpoint when all is written.
        Returns a handle with `remove()`.
        """
        return _added(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, folder)` called in `load_state`, before the models are loaded.

        What it takes out of `models` is left to it. Returns a handle with `remove()`.
        """
        return _added(self._load_model_state_pre_hook, hook)


@cache
def _say_that_it_waits(engine: str) -> None:
    logger.warning(
        f"save_state(async_save=True) returns when the checkpoint is on the disk: {engine} keeps its state where no "
        "copy of it can be taken while training goes on."
    )


@cache
def _tell_once() -> None:
    logger.warning(
        "save_state was called by the main process alone, which has waited for the others: the checkpoint is complete "
        "but for their random states, in place of which they get derived ones when it is loaded; call save_state on "
        "all processes."
    )


@contextmanager
def _only_main() -> Iterator[None]:
    """A context in which the main process talks to nobody: the others are not there."""
    _tell_once()
    everybody = current()
    set_current(Communicator())
    try:
        yield
    finally:
        set_current(everybody)


def _added(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _target(config: Any, output_dir: str | os.PathLike[str] | None) -> Path:
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise WrongFolder(
                "save_state needs a folder: pass `output_dir`, or a ProjectConfiguration with a `project_dir` and "
                "`automatic_checkpoint_naming=True`."
            )
        return Path(os.path.expanduser(output_dir))
    if config.project_dir is None:
        raise WrongFolder("automatic_checkpoint_naming needs a `project_dir` in the ProjectConfiguration.")
    return layout.automatic(Path(config.project_dir), config.iteration)


def _free(target: Path, config: Any, own: Path | None) -> Path:
    """A folder that is named automatically is a new one, and at first (own: not yet) no number before that of others.

    There would be two runs in one project, of which each deletes checkpoints and loads those of the other.
    """
    if not config.automatic_checkpoint_naming:
        return target
    others = layout.automatic_folders(Path(config.project_dir)) if own != target.parent else []
    later = [folder for folder in others if (layout.automatic_number(folder) or 0) >= config.iteration]
    if later or target.exists():
        wrong = f"{target} exists already"
        if not target.exists():
            wrong = f"{later[-1]} is of another run, and {target.name} would be the next of this one"
        raise WrongFolder(
            f"{wrong}: set `accelerator.project_configuration.iteration` to the number that the next "
            "checkpoint should have, load the last one first, or give another `project_dir`."
        )
    return target


def _source(config: Any, input_dir: str | os.PathLike[str] | None) -> str | None:
    """The folder to load; None for the newest of the project."""
    if input_dir is not None:
        folder = Path(os.path.expanduser(input_dir))
        if not folder.is_dir():
            raise WrongFolder(f"{folder} is no folder: give that of a checkpoint to load.")
        return str(folder)
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        raise WrongFolder(
            "load_state without a folder looks for the newest checkpoint of a project: pass `input_dir`, or a "
            "ProjectConfiguration with a `project_dir` and `automatic_checkpoint_naming=True`."
        )
    return None
