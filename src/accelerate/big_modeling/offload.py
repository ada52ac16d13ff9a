"""Running a whole model whose weights lie in host memory or on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.placeholder import OffloadedParameter
from accelerate.big_modeling.slot import refuse_shapes
from accelerate.big_modeling.store import OffloadedWeightsLoader, keep_on_disk
from accelerate.big_modeling.tensors import (
    find_tensor,
    get_non_persistent_buffers,
    has_plain_memory,
    set_module_tensor_to_device,
    table_of,
    with_index,
)
from accelerate.big_modeling.ties import find_tied_parameters
from accelerate.hooks.align import AlignDevicesHook, align_hooks, watch
from accelerate.hooks.attach import attach_align_device_hook
from accelerate.hooks.base import add_hook_to_module
from accelerate.hooks.cpu_offload import CpuOffload, UserCpuOffloadHook
from accelerate.state import PartialState
from accelerate.torch_internals.modules import parameters_of

Device = int | str | torch.device


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in host memory, and bring each module's to the device for its forward.

    execution_device: where it runs; by default where its first parameter is. offload_buffers: whether buffers are kept
    in host memory too. state_dict: the weights; by default those of the model. preload_module_classes: classes whose
    weights come in all at once, because their forward uses those of the modules inside.
    """
    weights = state_dict if state_dict is not None else to_host(model.state_dict())
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in files, and bring each module's to the device for its forward.

    offload_dir: the folder of the files; weights that it has already are not written again. The others: see
    `cpu_offload`.
    """
    keep_on_disk(offload_dir, state_to_offload(model, offload_buffers))
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    execution_device: Device | None,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    if execution_device is None:
        first = next(model.parameters(), None)
        on_device = first is not None and not first.is_meta
        execution_device = first.device if first is not None and on_device else PartialState().default_device
    tied = find_tied_parameters(model)
    refuse_missing(model, weights, names_to_offload(model, offload_buffers), tied)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    tie_offloaded(model, tied)
    watch(model)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it is called; it then stays on the device until its hook is told otherwise.

    For models that run one after the other: give each the hook of the one before, which then makes room by itself.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def state_to_offload(model: nn.Module, offload_buffers: bool) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict, without buffers where these stay on the device."""
    stays = () if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = model.state_dict().items()
    return {name: value for name, value in state if name not in stays and isinstance(value, torch.Tensor)}


def names_to_offload(model: nn.Module, offload_buffers: bool) -> list[str]:
    """The names of the tensors that lie elsewhere once a whole model is offloaded."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if offload_buffers:
        left_out = get_non_persistent_buffers(model, recurse=True, fqns=True)
        names += [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in left_out]
    return names


def refuse_missing(
    model: nn.Module, weights: Mapping[str, torch.Tensor], names: list[str], tied: list[list[str]]
) -> None:
    """Raises where there is no value for a tensor that is to be offloaded, or one of another shape.

    Of tied ones, one name is enough.
    """
    held = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    known = set(weights)
    if isinstance(held, dict):  # another mapping may read its values from somewhere
        known -= {name for name, value in held.items() if getattr(value, "is_meta", False)}
    known |= {name for group in tied if not known.isdisjoint(group) for name in group}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"There is no value for {', '.join(missing)} of this {type(model).__name__}: load its weights before it is "
            "offloaded, or give a state_dict or an offload_index that has them all."
        )
    if isinstance(held, dict):
        places = {name: find_tensor(model, name) for name in names}
        refuse_shapes({name: table_of(*place)[place[1]] for name, place in places.items()}, weights)


def to_host(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict in host memory; those that are one stay one."""
    moved: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state is whatever a module likes
        key: Any = name
        if tensor.device.type not in ("cpu", "meta") and has_plain_memory(tensor):
            key = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in moved:
            moved[key] = tensor.detach().to("cpu") if not tensor.is_meta else tensor.detach()
        result[name] = moved[key]
    return result


def tie_offloaded(model: nn.Module, tied: list[list[str]]) -> None:
    """Make the names of one parameter one again, now that hooks have placed each of them.

    Where one of them stays on a device, those that run on the same device use it, instead of a copy of their own.
    """
    for group in tied:
        homes = []
        for name in group:
            path, _, attribute = name.rpartition(".")
            homes.append((parameters_of(model.get_submodule(path)), attribute))
        shared: dict[torch.device, Any] = {}
        for real_ones in (True, False):
            for table, attribute in homes:
                parameter: Any = table[attribute]
                if isinstance(parameter, OffloadedParameter) is real_ones:
                    continue
                device = parameter.device if real_ones else with_index(parameter.slot.device)
                kept = shared.setdefault(device, parameter)
                table[attribute] = kept
                if isinstance(kept, OffloadedParameter):
                    parameter.slot.placeholder = kept


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """Have the tensors of a module on a device inside the `with`, if they are offloaded or elsewhere.

    execution_device: which one; by default where the module runs.
    """
    hooks = [hook for hook in align_hooks(module) if hook.offload]
    if hooks:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook.brought_in(module, execution_device))
            yield
    elif execution_device is not None:
        devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        # From the meta device nothing comes back.
        kept = dict(parameters_of(module)) if torch.device(execution_device).type == "meta" else {}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            parameters_of(module).update(kept)
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def has_offloaded_params(module: nn.Module) -> bool:
    """Says whether a module has a hook that brings its weights in from elsewhere."""
    return any(hook.offload for hook in align_hooks(module))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put offloaded weights into a model, on the CPU. index: what stands in the index.json of the folder."""
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        if not name.endswith("SCB"):  # the scales of an 8-bit weight come with it
            scales = f"{name.removesuffix('weight')}SCB"
            set_module_tensor_to_device(model, name, "cpu", value=weights[name], fp16_statistics=weights.get(scales))
