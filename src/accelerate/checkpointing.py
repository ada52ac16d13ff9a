"""Checkpoints, file by file, under their public path. `Accelerator.save_state` is the whole of it, in one safe step."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.checkpoint import disk, layout, whole
from accelerate.checkpoint.files import read_torch
from accelerate.checkpoint.load import check_map_location, verify_checkpoint
from accelerate.checkpoint.parts import write_parts
from accelerate.checkpoint.reading import Reader
from accelerate.checkpoint.state import (
    Run,
    apply_loaders,
    apply_objects,
    apply_random_states,
    own_parts,
    read,
    shared_parts,
)
from accelerate.checkpoint.stream import summed_up
from accelerate.checkpoint.weights import tell_manifest
from accelerate.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)
from accelerate.files import save
from accelerate.state import PartialState

__all__ = [
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "WEIGHTS_NAME",
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
    """Write the files of a checkpoint straight into a folder; returns it.

    The main process (or the first of each machine) writes what all share, each process its random states.
    """
    state = PartialState()
    run = Run(process_index, state.num_processes, state.device_kind)
    run.optimizers, run.schedulers, run.loaders, run.scaler = optimizers, schedulers, dataloaders, scaler
    folder = Path(output_dir)
    disk.make_folder(folder)
    main = state.is_local_main_process if save_on_each_node else state.is_main_process
    if main:
        disk.remove(folder / layout.MANIFEST)  # of a checkpoint that was there, and is written over
    write_parts(whole.save(run, model_states, safe=safe_serialization, main=main), folder)
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
    """Load the files of a checkpoint into these objects; returns what else it says of the accelerator (`step`).

    map_location: "cpu", or "on_device" for the device of this process. load_kwargs: for `torch.load`.
    """
    check_map_location(map_location)
    state = PartialState()
    run = Run(process_index, state.num_processes, state.device_kind, saved_ranks=state.num_processes)
    run.models, run.optimizers, run.schedulers, run.loaders, run.scaler = (
        models,
        optimizers,
        schedulers,
        dataloaders,
        scaler,
    )
    run.without_hooks = models
    kwargs = dict(load_kwargs or {})
    if map_location is not None:
        kwargs["map_location"] = state.device if map_location == "on_device" else "cpu"
    reader = Reader(Path(input_dir))
    put = whole.load(run, reader, torch_load=kwargs, **load_model_func_kwargs)
    loaded = read(run, reader, **kwargs)
    with ExitStack() as undo:
        apply_objects(loaded, run, undo)
        put.first(undo)
        undo.pop_all()
    put.rest()
    apply_loaders(loaded, run)
    apply_random_states(loaded, run)
    step = (loaded.random_states or {}).get("step")
    return {} if step is None else {"step": step}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to `custom_checkpoint_<index>.pkl` in a folder."""
    name = layout.custom(index)
    save(obj.state_dict(), Path(path) / name, save_on_each_node=save_on_each_node)
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        tell_manifest(Path(path), {name: summed_up(Path(path) / name)})


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give an object the state in `custom_checkpoint_<index>.pkl` of a folder."""
    obj.load_state_dict(read_torch(Path(path) / layout.custom(index)))
