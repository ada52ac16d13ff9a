"""Saving and loading one sharded model, or one optimizer, by itself: for scripts that lay out their own folders."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.agreement import own_result
from accelerate.checkpoint.parts import Part, write_parts
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.comm.tree import recursively_apply
from accelerate.errors import CheckpointError
from accelerate.modules import is_peft_model
from accelerate.parallel.shards import local
from accelerate.strategies.sharded import Sharded, gathers
from accelerate.text import differences
from accelerate.torch_internals.fsdp1 import name_before
from accelerate.unwrap import unwrapped, unwrapped_optimizer

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model to a folder, as the `state_dict_type` of the plugin says. Call it on all ranks.

    Args:
        fsdp_plugin: the plugin.
        accelerator: the Accelerator.
        model: the prepared model.
        output_dir: the folder.
        model_index: the number of the model, if there are several.
        adapter_only: save only the adapter of a `peft` model.
        use_dcp: False writes one file per rank, without communication. Only the same number of ranks, sharded in the
            same way, can load it.
    """
    engine = _engine(accelerator)
    full = gathers(fsdp_plugin)
    adapter = adapter_only and is_peft_model(model)
    keep: Callable[[dict[str, Any]], dict[str, Any]] = _adapter_of(model) if adapter else dict
    if full or use_dcp:
        _write(engine.model_parts(model, model_index, gathers=full, keep=keep), output_dir)
    else:
        _save_own(
            keep(engine.sharded_state_dict(model)), layout.own_model(model_index, accelerator.process_index), output_dir
        )


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` wrote, or a full checkpoint, into a sharded model. Call it on all ranks.

    Args:
        fsdp_plugin: the plugin.
        accelerator: the Accelerator.
        model: the prepared model.
        input_dir: the folder.
        model_index: the number of the model, if there are several.
        adapter_only: load only the adapter of a `peft` model.
        use_dcp: as in `save_fsdp_model`.
    """
    engine = _engine(accelerator)
    adapter = adapter_only and is_peft_model(model)
    own_file = Path(input_dir) / layout.own_model(model_index, accelerator.process_index)

    def read() -> dict[str, Any]:
        names = _adapter_names(model, engine.sharded_state_dict(model)) if adapter else None
        if not use_dcp and not gathers(fsdp_plugin):
            own = engine.sharded_state_dict(model)
            stored = {name: name for name in own} if names is None else names
            found = _load_own(own_file, {name: own[inside] for name, inside in stored.items()})
            _check_names(own_file, found, stored)
            return {stored[name]: value for name, value in found.items()}
        return engine.read_model(model, CheckpointReader(Path(input_dir)), model_index, names=names)

    engine.load_sharded_state_dict(model, own_result(read))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a sharded model's optimizer to a folder. Call it on all ranks.

    Args:
        fsdp_plugin: the plugin.
        accelerator: the Accelerator.
        optimizer: the prepared optimizer.
        model: the prepared model.
        output_dir: the folder.
        optimizer_index: the number of the optimizer, if there are several.
        use_dcp: as in `save_fsdp_model`.
    """
    engine = _engine(accelerator)
    optimizer, full = unwrapped_optimizer(optimizer), gathers(fsdp_plugin)
    if full or use_dcp:
        parts = engine.optimizer_parts([model], optimizer, optimizer_index, gathers=full)
        _write(parts, output_dir)
    else:
        content = optimizer.state_dict()
        _save_own(content, layout.own_optimizer(optimizer_index, accelerator.process_index), output_dir)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` wrote, or the state of an unsharded optimizer. Call it on all ranks.

    Args:
        fsdp_plugin: the plugin.
        accelerator: the Accelerator.
        optimizer: the prepared optimizer.
        model: the prepared model.
        input_dir: the folder.
        optimizer_index: the number of the optimizer, if there are several.
        adapter_only: load only the state of the adapter of a `peft` model.
        use_dcp: as in `save_fsdp_model`.
    """
    engine = _engine(accelerator)
    optimizer = unwrapped_optimizer(optimizer)
    if not use_dcp and not gathers(fsdp_plugin):
        own_file = Path(input_dir) / layout.own_optimizer(optimizer_index, accelerator.process_index)
        content = own_result(lambda: _load_own(own_file, optimizer.state_dict()))
        optimizer.load_state_dict(content)
        return
    content = own_result(
        lambda: engine.read_optimizer([model], optimizer, CheckpointReader(Path(input_dir)), optimizer_index),
    )
    engine.load_sharded_optimizer_state_dict([model], optimizer, content)


def _engine(accelerator: Any) -> Sharded:
    engine = accelerator._strategy
    if not isinstance(engine, Sharded):
        raise ValueError(
            "This run does not use FSDP, so nothing is sharded: use `accelerator.save_state` and `load_state`, or pass "
            "a FullyShardedDataParallelPlugin to the Accelerator."
        )
    return engine


def _write(parts: Iterable[Part], folder: Folder) -> None:
    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        write_parts(parts, Path(folder))

    own_result(write)


# --- one file per process ---------------------------------------------------------------------------------------


def _save_own(content: dict[str, Any], name: str, folder: Folder) -> None:
    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        torch.save(recursively_apply(lambda tensor: local(tensor.detach()), content), Path(folder) / name)

    own_result(write)


def _load_own(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing: a model saved with use_dcp=False can only be loaded by as many processes as saved it."
        )
    content: dict[str, Any] = _filled(torch.load(path, map_location="cpu", weights_only=True), like)
    return content


def _check_names(path: Path, found: dict[str, Any], expected: dict[str, str]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"The weights in {path} are not those of this model ({differences(missing=missing, unknown=extra)}): "
            "create the model as it was when they were saved, and give the same adapter_only."
        )


def _filled(value: Any, like: Any) -> Any:
    """What was read, with tensors spread as in `like`."""
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
        twin = torch.empty_like(like)
        if local(twin).shape != value.shape:
            raise CheckpointError(
                f"A shard of shape {tuple(value.shape)} does not fit one of shape {tuple(local(twin).shape)}."
            )
        local(twin).copy_(value)
        return twin
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        return {key: _filled(item, known.get(key)) for key, item in value.items()}
    return value


# --- adapters ---------------------------------------------------------------------------------------------------


def _adapter_of(model: torch.nn.Module) -> Callable[[dict[str, Any]], dict[str, Any]]:
    peft = importlib.import_module("peft")
    inner: Any = unwrapped(model)

    def keep(state: dict[str, Any]) -> dict[str, Any]:
        places = _places(inner)
        given = {_placed(name, places): value for name, value in state.items()}
        found = peft.get_peft_model_state_dict(inner, state_dict=given, adapter_name=inner.active_adapter)
        return {name_before(name): value for name, value in found.items()}

    return keep


# peft finds the weights of an adapter by the modules they belong to, whose names FSDP version 1 changes.


def _places(model: torch.nn.Module) -> dict[str, str]:
    """Where each module is now, by the name it had."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        found.setdefault(name_before(name), name)
    return found


def _placed(name: str, places: dict[str, str]) -> str:
    module, _, own = name.rpartition(".")
    return f"{places[module]}.{own}" if module in places else name


def _adapter_names(model: torch.nn.Module, own: Iterable[str]) -> dict[str, str]:
    """The name of each weight of the adapter in a file -> its name in the model."""
    return _adapter_of(model)({name: name for name in own})
