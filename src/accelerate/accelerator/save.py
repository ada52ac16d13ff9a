"""Saving: models, files, and whole runs to go on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from accelerate.accelerator.report import Reporting
from accelerate.errors import warn

logger: logging.Logger = logging.getLogger(__name__)


Model = TypeVar("Model", bound=torch.nn.Module)  # declared as what it was, also when it is prepared


class Saving(Reporting):
    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """The model as it was before `prepare`.

        keep_fp32_wrapper: leave mixed precision in its forward. keep_torch_compile: leave it compiled.
        """
        unwrapped: Model = self._strategy.unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )
        return unwrapped

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; unwrap: with the names it had before `prepare`."""
        return self._strategy.state_dict(model, unwrap=unwrap)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once (or once per machine, if the project configuration says so).

        safe_serialization: write a dict of tensors as safetensors.
        """
        from accelerate.files import save

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
        from accelerate.checkpoint.agreement import agree
        from accelerate.checkpoint.weights import Coming, save_weights

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
        from accelerate.accelerator import whole_run

        self._look_for_resume()
        self._communicator.verify("save_state", None)
        self.wait_for_checkpoint()
        folder = whole_run.save_state(self, output_dir, safe_serialization, async_save, save_model_func_kwargs)
        self._tell_trackers("saved", str(folder.absolute()))
        return folder

    def wait_for_checkpoint(self) -> None:
        """Return when the last `save_state(async_save=True)` is on the disk; raise what it failed with."""
        self._background.wait()

    def end_training(self) -> None:
        """Finish the checkpoint that is being written, and then whatever else has to end with the training."""
        self._look_for_resume()
        try:
            self.wait_for_checkpoint()
        finally:
            super().end_training()

    def _look_for_resume(self) -> None:
        """Says once that `--resume auto` is of no use to a script that loads nothing."""
        if not self._resume_is_due:
            return
        self._resume_is_due = False
        if self.is_main_process:
            warn(
                "The run was launched with `--resume auto`, but the script has loaded no checkpoint, so it began anew: "
                "call `accelerator.resume()` when everything is prepared and registered."
            )

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
        from accelerate.accelerator import whole_run

        self._resume_is_due = False
        self._communicator.verify("load_state", None)
        self.wait_for_checkpoint()
        folder = whole_run.load_state(self, input_dir, load_kwargs, load_model_func_kwargs)
        self._tell_trackers("loaded", str(folder.absolute()))

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


def _added(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
