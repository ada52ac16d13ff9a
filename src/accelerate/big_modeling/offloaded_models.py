"""Running a whole model whose weights lie in host memory or on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.available import is_cuda_available
from accelerate.big_modeling.device_memory import as_classes
from accelerate.big_modeling.ties import find_tied_parameters
from accelerate.devices.base import DeviceLike
from accelerate.hooks.align import AlignDevicesHook, align_hooks, watch
from accelerate.hooks.attach import attach_align_device_hook
from accelerate.hooks.base import add_hook_to_module
from accelerate.hooks.cpu_offload import CpuOffload, UserCpuOffloadHook
from accelerate.offload.module_tensors import (
    find_tensor,
    get_non_persistent_buffers,
    has_plain_memory,
    set_module_tensor_to_device,
    table_of,
    with_index,
)
from accelerate.offload.offloaded_weights import OffloadedWeightsLoader, keep_on_disk, offload_weight
from accelerate.offload.placeholder import OffloadedParameter
from accelerate.offload.slot import refuse_values
from accelerate.state import PartialState
from accelerate.text import some_of
from accelerate.torch_internals.modules import parameters_of


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in host memory, and bring those of each module to the device for its forward.

    Args:
        model: the model.
        execution_device: where it runs. By default where its first parameter is; for an empty model, the
            first accelerator.
        offload_buffers: offload buffers as well.
        state_dict: the weights. By default those of the model.
        preload_module_classes: names of classes whose weights are brought in all at once, submodules included, because
            their forward uses weights of submodules directly.

    Returns:
        The model.
    """
    weights = state_dict if state_dict is not None else to_host(model.state_dict())
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in files, and bring those of each module to the device for its forward.

    Args:
        model: the model.
        offload_dir: the folder of the files. Weights that it already has are not written again.
        execution_device: where the model runs. By default as in `cpu_offload`.
        offload_buffers: offload buffers as well.
        preload_module_classes: as in `cpu_offload`.

    Returns:
        The model.
    """
    keep_on_disk(offload_dir, state_to_offload(model, offload_buffers))
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    execution_device: DeviceLike | None,
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
        preload_module_classes=as_classes(preload_module_classes),
    )
    tie_offloaded(model, tied)
    watch(model)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it is called; it then stays on the device until its hook offloads it.

    For models that run one after the other: pass each the hook of the one before, which then makes room by itself.

    Args:
        model: the model.
        execution_device: where it runs. By default the first accelerator of this machine.
        prev_module_hook: the hook of the model that runs before this one.

    Returns:
        The model and its hook.

    Example:
        ```python
        encoder, first = cpu_offload_with_hook(encoder, "cuda")
        decoder, second = cpu_offload_with_hook(decoder, "cuda", prev_module_hook=first)
        output = decoder(encoder(inputs))  # the encoder leaves the GPU when the decoder is called
        second.offload()
        ```
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def state_to_offload(model: nn.Module, offload_buffers: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict, without buffers if these stay on the device."""
    stays = () if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = model.state_dict().items()
    return {name: value for name, value in state if name not in stays and isinstance(value, torch.Tensor)}


def names_to_offload(model: nn.Module, offload_buffers: bool) -> list[str]:
    """Return the names of the tensors that are offloaded with a whole model."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if offload_buffers:
        left_out = get_non_persistent_buffers(model, recurse=True, fqns=True)
        names += [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in left_out]
    return names


def refuse_missing(
    model: nn.Module, weights: Mapping[str, torch.Tensor], names: list[str], tied: list[list[str]]
) -> None:
    """Raise an error if a tensor that is to be offloaded has no value, or one with another shape.

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
            f"There is no value for {some_of(missing)} of this {type(model).__name__}: load its weights before it is "
            "offloaded, or give a state_dict or an offload_index that has them all."
        )
    if isinstance(held, dict):
        places = {name: find_tensor(model, name) for name in names}
        refuse_values({name: table_of(*place)[place[1]] for name, place in places.items()}, weights)


def to_host(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict in host memory. Shared ones stay shared."""
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
        places = [find_tensor(model, name) for name in group]
        homes = [(parameters_of(module), attribute) for module, attribute in places]
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
    """Move the tensors of a module to a device inside the `with` block, if they are offloaded or elsewhere.

    Args:
        module: the module.
        execution_device: the device. By default the one that the module runs on.

    Example:
        ```python
        with align_module_device(model.head, torch.device("cpu")):
            norm = model.head.weight.norm()
        ```
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
    """Tell whether a module has a hook that brings in its weights from host memory or disk.

    Args:
        module: the module.
    """
    return any(hook.offload for hook in align_hooks(module))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load offloaded weights into a model, on the CPU.

    Args:
        model: the model.
        index: the content of the `index.json` of the folder.
        offload_folder: the folder.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        if not name.endswith("SCB"):  # the scales of an 8-bit weight come with it
            scales = f"{name.removesuffix('weight')}SCB"
            set_module_tensor_to_device(model, name, "cpu", value=weights[name], fp16_statistics=weights.get(scales))


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a weight of an 8-bit layer and its scales to an offload folder, and leave the weight in the model empty.

    Args:
        model: the model.
        param: the weight.
        param_name: its name in the model.
        new_dtype: the dtype to quantize from.
        offload_folder: the folder.
        offload_index: the index of the folder, which gets the new entries.
        fp16_statistics: the scales of a weight that is already quantized. Without them, it is quantized here.
    """
    holder, name = find_tensor(model, param_name)
    scales = fp16_statistics
    if scales is None:
        # On the GPU if there is one: it is much faster there.
        device = torch.device("cuda", 0) if is_cuda_available() else torch.device("cpu")
        set_module_tensor_to_device(model, param_name, device, value=param, dtype=new_dtype, clear_cache=False)
        quantized: Any = parameters_of(holder)[name]
        param, scales = quantized.data, getattr(quantized, "SCB", None)
    offload_weight(param, param_name, offload_folder, offload_index)
    if scales is not None:
        offload_weight(scales, f"{param_name.rpartition('.')[0]}.SCB", offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta", clear_cache=False)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with all its weights, offloaded or not, on the CPU.

    Args:
        model: the model.

    Raises:
        RuntimeError: a weight has no value anywhere.
    """
    state: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            get_state_dict_from_offload(module, f"{name}.weight" if name else "weight", state)
    lost = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if lost:
        raise RuntimeError(
            f"{some_of(lost)} of this {type(model).__name__} cannot be saved, because nothing says where their "
            "values are: load them before saving."
        )
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Fill in the weights of an offloaded module in a state dict.

    Args:
        module: the module.
        module_name: the name of one of its weights in the state dict.
        state_dict: the state dict, which is changed.
        device_to_put_offload: where offloaded weights are put.

    Returns:
        The same state dict.
    """
    start = module_name.rpartition(".")[0]
    device = torch.device(device_to_put_offload) if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, value in module.state_dict().items():
            full = f"{start}.{name}" if start else name
            if full in state_dict:
                state_dict[full] = value
    return state_dict
