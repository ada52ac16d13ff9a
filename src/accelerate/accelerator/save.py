"""Saving: models, files, and whole runs to go on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from accelerate.accelerator.report import Reporting
from accelerate.comm import current
from accelerate.errors import a_kind_of, warn

Model = TypeVar("Model", bound=torch.nn.Module)  # declared as what it was, also when it is prepared


class Saving(Reporting):
    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """Return the model as it was before `prepare`.

        Args:
            model: the prepared model.
            keep_fp32_wrapper: keep mixed precision in its forward.
            keep_torch_compile: keep it compiled.

        Returns:
            The original model.
        """
        unwrapped: Model = self._strategy.unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )
        return unwrapped

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a prepared model. Call it on all ranks.

        Args:
            model: the prepared model.
            unwrap: use the names that parameters had before `prepare`.

        Returns:
            The state dict. For sharded models, only the main process gets the weights.
        """
        return self._strategy.state_dict(model, unwrap=unwrap)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file once, or once per machine if the project configuration says so.

        Args:
            obj: the object.
            f: the path of the file.
            safe_serialization: write a dict of tensors as safetensors.
        """
        from accelerate.checkpoint.model_weights import save

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
        """Write the weights of a model, for inference or sharing. Call it on all ranks.

        Args:
            model: the model, prepared or not.
            save_directory: the folder to write to.
            max_shard_size: larger weights are split into several files with an index.
            safe_serialization: write safetensors, which store a tied tensor once; otherwise torch files.
        """
        from accelerate.checkpoint.agreement import gather_or_raise
        from accelerate.checkpoint.model_weights import StreamedWeights, save_weights

        if not hasattr(model, "state_dict"):
            given = repr(model) if isinstance(model, (str, os.PathLike)) else "what was given"  # weights are long
            raise AttributeError(  # as the release does, with other words
                f"`save_model` writes the weights of a model, and {given} is {a_kind_of(model)}: pass the model, and "
                "then the folder."
            )
        described = self._strategy.stream_weights(model) if safe_serialization else None
        weights = self.get_state_dict(model) if described is None else StreamedWeights(*described, max_shard_size)
        everywhere = self.project_configuration.save_on_each_node
        failure: Exception | None = None
        if self.is_local_main_process if everywhere else self.is_main_process:
            try:
                save_weights(weights, Path(save_directory), max_shard_size, safe_serialization)
            except Exception as error:
                failure = error
        if isinstance(weights, StreamedWeights):
            weights.finish()
            gather_or_raise(failure)
        else:  # nobody is asked: a script may call this on the main process alone
            gather_or_raise(failure, gather=lambda own: [own])

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything that training needs to continue: models, optimizers, schedulers, loaders, random states.

        A checkpoint is complete, or it does not exist: whatever happens during the save, the previous one stays as it
        was. With `automatic_checkpoint_naming` it goes to `checkpoints/checkpoint_<n>` in the project's folder; then
        the oldest checkpoints beyond `total_limit` are deleted. Call it on all ranks.

        Args:
            output_dir: the folder to save to.
            safe_serialization: write weights as safetensors; otherwise as torch files.
            async_save: return as soon as everything is copied to the host, and write in the background. The checkpoint
                holds the state of this moment. An error is raised by the next save, `wait_for_checkpoint` or
                `end_training`.
            save_model_func_kwargs: arguments for the engine, where it takes any.

        Returns:
            The folder of the checkpoint.
        """
        from accelerate.accelerator import whole_run

        self._look_for_resume()
        current().verify("save_state", None)
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
                "The run was launched with `--resume auto`, but the script has not loaded a checkpoint, so it started "
                "from the beginning: call `accelerator.resume()` after everything is prepared and registered."
            )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore a checkpoint. Call it on all ranks, after `prepare`, with the same objects that were saved.

        Everything is read and checked before anything is changed, and no code in the files is run. On another number of
        ranks than it was saved on, new ranks get derived random states.

        Args:
            input_dir: the folder of the checkpoint. Without it, under `automatic_checkpoint_naming`, the newest
                complete checkpoint of the project is loaded.
            load_kwargs: arguments for `torch.load`.
            load_model_func_kwargs: arguments for the `load_state_dict` of models, such as `strict=False`.
                `map_location` ("cpu", "on_device") is accepted; everything ends up where it was before.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged, or does not fit the prepared objects.
        """
        from accelerate.accelerator import whole_run

        self._resume_is_due = False
        current().verify("load_state", None)
        self.wait_for_checkpoint()
        self._loaded_from = whole_run.load_state(self, input_dir, load_kwargs, load_model_func_kwargs)
        self._untold_load = self._loaded_from
        self._tell_of_load()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load more objects with the run.

        Args:
            objects: anything with `state_dict` and `load_state_dict`. They are matched by order.
        """
        wrong = [
            type(item).__name__
            for item in objects
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing was given {', '.join(wrong)}: registered objects need both `state_dict` "
                "and `load_state_dict`."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have a hook called in `save_state`, before anything else is written.

        Args:
            hook: called as `hook(models, weights, folder)`. State dicts that it removes from `weights` are left for it
                to save. Files that it writes to `folder` become part of the checkpoint.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return _added(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have a hook called in `load_state`, before the models are loaded.

        Args:
            hook: called as `hook(models, folder)`. Models that it removes from `models` are left for it to load.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return _added(self._load_model_state_pre_hook, hook)


def _added(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
