"""Checkpoints, file by file, under their public path. `Accelerator.save_state` is the whole of it, in one safe step."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.checkpoint import full_state, layout
from accelerate.checkpoint.load import check_map_location, verify_checkpoint
from accelerate.checkpoint.model_weights import save, tell_manifest
from accelerate.checkpoint.parts import write_parts
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, apply_objects, apply_random_states, read_objects
from accelerate.checkpoint.save import own_parts, shared_parts
from accelerate.io import disk
from accelerate.io.blocks import summed_up
from accelerate.io.safe_load import read_torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.unwrap import unwrapped

__all__ = [
    "load_accelerator_state",
    "load_custom_state",
    "save_accelerator_state",
    "save_custom_state",
    "verify_checkpoint",
]


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the files of a checkpoint directly into a folder.

    `Accelerator.save_state` does the same in one safe step.

    The main process (or the first of each machine) writes what all ranks share, and each rank its random states.

    Args:
        output_dir: the folder.
        model_states: the state dicts of the models.
        optimizers: the optimizers.
        schedulers: the schedulers.
        dataloaders: the loaders.
        process_index: the rank of this process.
        step: the number of the step, stored with the random states.
        scaler: the gradient scaler of fp16, if there is one.
        save_on_each_node: let the first rank of each machine write, because machines do not share a disk.
        safe_serialization: write weights as safetensors; otherwise as torch files.

    Returns:
        The folder.
    """
    state = PartialState()
    run = Run(process_index, state.num_processes, state.device_kind)
    run.optimizers, run.schedulers = list(map(_inner, optimizers)), list(map(_inner, schedulers))
    run.loaders, run.scaler = dataloaders, scaler
    folder = Path(output_dir)
    disk.make_folder(folder)
    main = state.is_local_main_process if save_on_each_node else state.is_main_process
    if main:
        disk.remove(folder / layout.MANIFEST)  # of a checkpoint that was there, and is written over
    write_parts(full_state.save(run, model_states, safe=safe_serialization, main=main), folder)
    write_parts(shared_parts(run, main), folder)
    write_parts(own_parts(run, step), folder)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load the files of a checkpoint into objects.

    Args:
        input_dir: the folder.
        models: the models, in the order they were saved.
        optimizers: the optimizers, in the order they were saved.
        schedulers: the schedulers, in the order they were saved.
        dataloaders: the loaders, in the order they were saved.
        process_index: the rank of this process.
        scaler: the gradient scaler of fp16, if there is one.
        map_location: "cpu", or "on_device" for the device of this process.
        load_kwargs: arguments for `torch.load`.
        load_model_func_kwargs: arguments for the `load_state_dict` of models.

    Returns:
        What else the checkpoint says about the run, such as `step`.
    """
    check_map_location(map_location)
    state = PartialState()
    run = Run(process_index, state.num_processes, state.device_kind, saved_ranks=state.num_processes)
    run.optimizers, run.schedulers = list(map(_inner, optimizers)), list(map(_inner, schedulers))
    run.models, run.loaders, run.scaler = models, dataloaders, scaler
    run.models_to_load, run.optimizers_to_load = list(map(unwrapped, models)), run.optimizers
    kwargs = dict(load_kwargs or {})
    if map_location is not None:
        kwargs["map_location"] = state.device if map_location == "on_device" else "cpu"
    reader = CheckpointReader(Path(input_dir))
    staged = full_state.load(run, reader, torch_load=kwargs, **load_model_func_kwargs)
    loaded = read_objects(run, reader, **kwargs)
    with ExitStack() as undo:
        apply_objects(loaded, run, undo)
        staged.apply_fallible(undo)
        undo.pop_all()
    staged.apply_in_place()
    for number, own_state in loaded.loaders.items():
        if getattr(dataloaders[number], "use_stateful_dataloader", False):
            dataloaders[number].load_state_dict(own_state)
    apply_random_states(loaded, run)
    step = (loaded.random_states or {}).get("step")
    return {} if step is None else {"step": step}


def _inner(item: Any) -> Any:
    """An optimizer or a scheduler as the script made it, whether it was prepared or not."""
    if isinstance(item, AcceleratedOptimizer):
        return item.optimizer
    return item.scheduler if isinstance(item, AcceleratedScheduler) else item


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to `custom_checkpoint_<index>.pkl` in a folder.

    Args:
        obj: an object with a `state_dict` method.
        path: the folder.
        index: the number of the file.
        save_on_each_node: let the first rank of each machine write, because machines do not share a disk.
    """
    name = layout.custom(index)
    save(obj.state_dict(), Path(path) / name, save_on_each_node=save_on_each_node)
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        tell_manifest(Path(path), {name: summed_up(Path(path) / name)})


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state in `custom_checkpoint_<index>.pkl` of a folder into an object.

    Args:
        obj: an object with a `load_state_dict` method.
        path: the folder.
        index: the number of the file.
    """
    obj.load_state_dict(read_torch(Path(path) / layout.custom(index)))
