"""Running one model on several devices, as a device map says."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate import big_modeling
from accelerate.big_modeling.device_map import infer_auto_device_map, refuse_disk
from accelerate.big_modeling.device_map_checks import closest_entry, refuse_devices
from accelerate.big_modeling.device_memory import as_classes, get_balanced_memory
from accelerate.big_modeling.offloaded_models import (
    names_to_offload,
    refuse_missing,
    state_to_offload,
    tie_offloaded,
    to_host,
)
from accelerate.big_modeling.ties import find_tied_parameters
from accelerate.big_modeling.weight_files import refuse_swapped
from accelerate.devices.base import DeviceLike
from accelerate.errors import a_kind_of
from accelerate.hooks.align import watch
from accelerate.hooks.attach import attach_align_device_hook_on_blocks
from accelerate.offload.module_tensors import PLACEHOLDERS
from accelerate.offload.offloaded_weights import OffloadedWeightsLoader, keep_on_disk
from accelerate.text import did_you_mean, some_of

logger: logging.Logger = logging.getLogger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
# The methods of a module that move all of it.
_MOVES = ("to", "cuda", "cpu", "npu", "xpu", "mlu", "sdaa", "musa")


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, DeviceLike],
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Spread a model over devices.

    Modules on "cpu" or "disk" beside a GPU run on the GPU: their weights are brought in for each forward.

    Args:
        model: the model.
        device_map: module and tensor names to devices; "" is the whole model.
        main_device: where modules on "cpu" or "disk" run. By default the first device of the map that is neither.
        state_dict: the weights of modules on "cpu". By default those of the model.
        offload_dir: the folder for modules on "disk". Weights that it already has are not written again.
        offload_index: instead of a folder, where each weight is (see `OffloadedWeightsLoader`).
        offload_buffers: offload buffers as well.
        skip_keys: keyword arguments of `forward` that are not moved between devices.
        preload_module_classes: names of classes whose weights are brought in all at once, submodules included, because
            their forward uses weights of submodules directly.
        force_hooks: add hooks to the modules even if there is only one device.

    Returns:
        The model, with the device map in `model.hf_device_map`.

    Raises:
        ValueError: the map does not cover the model, something is on "disk" and there is no folder, or a weight has no
            value.

    Example:
        ```python
        model = dispatch_model(model, {"embed": 0, "layers": 0, "head": "cpu"})
        ```
    """
    given: Any = device_map
    if isinstance(given, str):  # as `load_checkpoint_and_dispatch` takes
        raise ValueError(f"device_map is {given!r}: pass a device map, such as `infer_auto_device_map` returns.")
    # Looked up in its public place, where clients put another one for models with tensors that are in no map.
    big_modeling.check_device_map(model, device_map)
    refuse_devices(device_map)
    devices = {str(device) for device in device_map.values()}
    if len(devices) > 1 or "disk" in devices or force_hooks or _is_quantized(model):
        _dispatch(
            model,
            device_map,
            main_device,
            state_dict,
            offload_dir,
            offload_index,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=as_classes(preload_module_classes),
        )
        _guard_moves(model)
    else:
        for device in list(device_map.values())[:1]:  # a model without tensors needs none
            _refuse_empty(model, device)
            model.to(device)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _refuse_empty(model: nn.Module, device: DeviceLike) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta and not isinstance(tensor, PLACEHOLDERS)]
    if empty and torch.device(device).type != "meta":
        raise ValueError(
            f"This {type(model).__name__} has no values (meta device) for {some_of(empty)}: load its weights first, "
            "or use `load_checkpoint_and_dispatch`."
        )


def _is_quantized(model: Any) -> bool:
    """Tell whether bitsandbytes has quantized a model, which then cannot be moved as a whole."""
    quantized = getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False)
    return bool(quantized) and getattr(model, "quantization_method", "bitsandbytes") == "bitsandbytes"


def _dispatch(
    model: nn.Module,
    device_map: Mapping[str, DeviceLike],
    main_device: DeviceLike | None,
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
    **common: Any,
) -> None:
    elsewhere = ("cpu", "disk")
    if main_device is None:
        main_device = next((device for device in device_map.values() if str(device) not in elsewhere), "cpu")
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    in_memory = [name for name, device in device_map.items() if str(device) == "cpu"]
    if str(main_device) in ("cpu", "mps"):
        in_memory = []  # they run where they are, or share memory with what runs them
    if state_dict is None and in_memory:
        state_dict = to_host(_placed(model.state_dict(), device_map, in_memory))
    if on_disk:
        state = _placed(state_to_offload(model, common["offload_buffers"]), device_map, on_disk)
        if offload_index is not None:
            # New parameters, say, which no checkpoint has: the model has their values.
            more = {name: value for name, value in state.items() if name not in offload_index and not value.is_meta}
            state_dict = {**to_host(more), **(state_dict or {})}
        elif offload_dir is not None:
            keep_on_disk(offload_dir, state)
        else:
            placed = ", ".join(name or "the whole model" for name in on_disk)
            raise ValueError(f"The device map puts {placed} on disk, but there is no folder for it: pass offload_dir.")
    weights = None
    if state_dict is not None or on_disk:
        weights = OffloadedWeightsLoader(
            state_dict=state_dict,
            save_folder=offload_dir if on_disk else None,
            index=offload_index,
            device=None if offload_index is None else main_device,
        )

    offloaded = {*on_disk, *in_memory}
    tied = find_tied_parameters(model)
    if weights is not None and offloaded:
        names = names_to_offload(model, common["offload_buffers"])
        refuse_missing(model, weights, [n for n in names if closest_entry(n, device_map) in offloaded], tied)
    # Kept until all is placed, so that nothing else gets the address of one that has moved. By that address, hooks add
    # where they have put each.
    shared = [model.get_parameter(group[0]) for group in tied]
    attach_align_device_hook_on_blocks(
        model,
        execution_device={
            "": main_device,
            **{name: main_device if str(device) in elsewhere else device for name, device in device_map.items()},
        },
        offload={name: name in offloaded for name in device_map},
        weights_map=weights,
        tied_params_map={address: {} for parameter in shared if (address := parameter.data_ptr())},
        **common,
    )
    tie_offloaded(model, tied)
    watch(model)


def _placed(
    state_dict: Mapping[str, torch.Tensor], device_map: Mapping[str, DeviceLike], entries: list[str]
) -> dict[str, torch.Tensor]:
    """Return the part of a state dict that some entries of a map place."""
    wanted = set(entries)
    return {name: tensor for name, tensor in state_dict.items() if closest_entry(name, device_map) in wanted}


def _guard_moves(model: nn.Module) -> None:
    for name in _MOVES:
        if hasattr(type(model), name):
            setattr(model, name, functools.partial(_move, model, name))


def _move(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run `model.to` or a similar method on a dispatched model, if that is possible."""
    only_casts = name == "to" and not _names_device(args, kwargs)
    if not only_casts and any(hasattr(module, "_hf_hook") for module in model.modules()):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError(
                f"This {type(model).__name__} cannot be moved by `{name}`: its device map keeps some of its weights "
                "on the CPU or on disk and brings them in when they are used; dispatch it with another device map "
                "instead."
            )
        logger.warning(
            f"`{name}` moves the weights of {a_kind_of(model)} that is spread over devices, but its hooks stay as "
            "they were: dispatch it with another device map instead."
        )
    return getattr(type(model), name)(model, *args, **kwargs)


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(not isinstance(arg, (torch.dtype, bool)) for arg in args) or not kwargs.keys() <= {
        "dtype",
        "non_blocking",
    }


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, DeviceLike] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: str | list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, each weight directly onto its device, and dispatch the model.

    Args:
        model: the model, best built under `init_empty_weights`.
        checkpoint: a weight file (safetensors or torch), the index of a sharded checkpoint, or the folder of either.
        device_map: module and tensor names to devices, or how to choose them: "auto", "balanced", "balanced_low_0" or
            "sequential". None loads the weights and does not dispatch.
        max_memory: the limit of each device, as in `get_max_memory`.
        no_split_module_classes: names of classes that are never split.
        offload_folder: the folder for modules on "disk". Weights in safetensors files stay in these files.
        offload_buffers: offload buffers as well.
        dtype: cast floating-point weights to it. By default, to the dtype that the model has.
        offload_state_dict: has no effect, since weights are never in memory twice.
        skip_keys: keyword arguments of `forward` that are not moved between devices.
        preload_module_classes: as in `dispatch_model`.
        force_hooks: add hooks to the modules even if there is only one device.
        strict: raise an error if the checkpoint lacks weights or has others, instead of a warning.
        full_state_dict: for a sharded model without a device map: whether the checkpoint has full tensors.
        broadcast_from_rank0: for a sharded model without a device map: only rank 0 reads the checkpoint.

    Returns:
        The model.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit the model.
        ValueError: the device map does not cover the model or needs an offload folder.

    Example:
        ```python
        with init_empty_weights():
            model = Transformer(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint/", device_map="auto")
        ```
    """
    from accelerate.big_modeling.loading import checked_dtype, load_checkpoint_in_model

    refuse_swapped("load_checkpoint_and_dispatch", model)
    if isinstance(device_map, str):
        dtype = checked_dtype(dtype)
        device_map = find_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
        if offload_folder is None:
            refuse_disk(model, device_map, max_memory, dtype)
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def find_device_map(
    model: nn.Module, how: str, max_memory: Any, no_split: Any, dtype: Any, special_dtypes: Any = None, **common: Any
) -> dict[str, DeviceLike]:
    """Return a device map, chosen as one of the strategies says. common: for `infer_auto_device_map`."""
    if how not in _STRATEGIES:
        near = did_you_mean(how, _STRATEGIES)
        raise ValueError(f"device_map is {how!r}{near}: give a map, or one of {', '.join(map(repr, _STRATEGIES))}.")
    if how != "sequential":
        low_zero = how == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split, dtype, special_dtypes, low_zero)
    return dict(infer_auto_device_map(model, max_memory, no_split, dtype, special_dtypes, **common))
