"""The tensors of a module: listing them, and putting one of them on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from accelerate.available import is_xpu_available
from accelerate.devices.base import DeviceLike
from accelerate.memory import clear_device_cache
from accelerate.offload.parameter_kinds import PLAIN, is_packed, is_quantized, like, place_quantized
from accelerate.offload.placeholder import OffloadedParameter, OffloadedTensor
from accelerate.torch_internals.modules import EXTRA_STATE, buffers_of, non_persistent_buffers, parameters_of

# What stands in a module for a tensor that lies elsewhere.
PLACEHOLDERS = (OffloadedParameter, OffloadedTensor)


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the parameters, then the buffers of a module, with their names.

    Args:
        module: the module.
        include_buffers: include buffers.
        recurse: include those of submodules.
        remove_non_persistent: leave out buffers that are not in the state dict.

    Yields:
        Pairs of name and tensor.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not in the state dict.

    Args:
        module: the module.
        recurse: include those of submodules.
        fqns: return their full names, with the path of the submodule.
    """
    if not recurse:
        return set(non_persistent_buffers(module))
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in non_persistent_buffers(part)
    }


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is just the bytes at its address. One made of other tensors has no address."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def resolve_dtype(dtype: Any) -> Any:
    """Return the dtype behind a name such as `"float16"` or `"torch.float16"`; anything else as it is."""
    return getattr(torch, dtype.replace("torch.", "")) if isinstance(dtype, str) else dtype


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Tell whether two devices are the same; a GPU without a number is the first.

    Args:
        first_device: one device.
        second_device: the other.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return first_device == second_device
    return (first_device.index or 0) == (second_device.index or 0)


def with_index(device: DeviceLike) -> torch.device:
    """Return a device as its tensors report it: a GPU without a number is the current one."""
    return torch.empty(0, device=device).device


def extra_state_names(model: nn.Module) -> list[str]:
    """Return the names in the state dict of what modules keep there besides tensors."""
    return [
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    ]


def tensor_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return where each tensor of the state dict is, by name; one that two modules share has two names."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                found[f"{start}{name}"] = module, name
        left_out = non_persistent_buffers(module)
        for name, buffer in buffers_of(module).items():
            if buffer is not None and name not in left_out:
                found[f"{start}{name}"] = module, name
    return found


def table_of(module: nn.Module, attribute: str) -> MutableMapping[str, Any]:
    """Return the parameters or the buffers of a module, whichever contains a tensor."""
    parameters = parameters_of(module)
    return parameters if attribute in parameters else buffers_of(module)


def names_of_shared(places: Mapping[str, tuple[nn.Module, str]]) -> list[list[str]]:
    """Return the names of each tensor, parameter or buffer, that has several: one sorted list for each."""
    names: dict[int, list[str]] = {}
    for name, (module, attribute) in places.items():
        names.setdefault(id(table_of(module, attribute)[attribute]), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def find_tensor(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and the tensor's name there."""
    path, _, attribute = name.rpartition(".")
    holder = nn.Module.get_submodule(module, path)  # which modules of TorchScript refuse to do
    if attribute not in parameters_of(holder) and attribute not in buffers_of(holder):
        known = ", ".join([*parameters_of(holder), *buffers_of(holder)]) or "none"
        raise ValueError(
            f"{type(module).__name__} has no parameter or buffer called {name}: the "
            f"{type(holder).__name__} that would hold it has {known}."
        )
    return holder, attribute


# The shape and the strides of a tensor.
Form = tuple[torch.Size, tuple[int, ...]]


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.stride()


def shared_on(device: Any, placed: Mapping[Any, torch.Tensor] | None, form: Form | None) -> torch.Tensor | None:
    """Return the tensor that a parameter shares on a device, if it is there already.

    Args:
        device: the device, as it was written there.
        placed: by device, what has been made of the tensor at the address of the source.
        form: that of the value of the parameter. A view of other elements may begin at the same address.
    """
    found = placed.get(device) if placed else None
    return found if found is not None and (is_packed(found) or form_of(found) == form) else None


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: DeviceLike,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, with a new value if one is given.

    Args:
        module: the module.
        tensor_name: the name of the tensor, with the path of its submodule.
        device: the device.
        value: the new value, of the same shape. A tensor on the meta device needs one.
        dtype: cast the value to it, unless it holds integers. By default, to the dtype of the tensor.
        fp16_statistics: the scales of an 8-bit weight.
        tied_params_map: tensors that several modules share, by address and then by device.
        non_blocking: copy without waiting for the device.
        clear_cache: empty the device's cache of free memory afterwards.

    Raises:
        ValueError: there is no such tensor, it has no value, or the value has another shape.
    """
    holder, name = find_tensor(module, tensor_name)
    parameters, buffers = parameters_of(holder), buffers_of(holder)
    old: Any = table_of(holder, name)[name]
    if old is None:
        raise ValueError(f"{tensor_name} of this {type(module).__name__} is None, so there is no tensor to place.")

    tied = {} if tied_params_map is None or name in buffers else tied_params_map
    sources = [known for known in (value, old) if tied and known is not None]
    for source in sources:
        shared: Any = shared_on(device, tied.get(source.data_ptr()), form_of(source))
        if shared is not None:
            parameters[name] = shared
            return

    target = torch.device(device)
    if target.type == "xpu" and not is_xpu_available():
        raise ValueError(f"{tensor_name} cannot be put on {device}, because this machine has no XPU: put it on 'cpu'.")
    # A tensor that lies elsewhere, with a hook that knows where, has a value: moving it brings that in.
    if value is None and old.is_meta and target.type != "meta" and not isinstance(old, PLACEHOLDERS):
        raise ValueError(f"{tensor_name} is on the meta device and holds no value: give one to put it on {device}.")
    if value is not None and value.shape != old.shape and not is_packed(old):
        raise ValueError(
            f"{tensor_name} of this {type(module).__name__} has shape {tuple(old.shape)}, its value has shape "
            f"{tuple(value.shape)}: they must be the same."
        )

    with torch.no_grad():
        if name in buffers:
            buffers[name] = _moved(old, value, target, dtype, non_blocking)
        elif is_quantized(old):
            place_quantized(holder, name, value, target, fp16_statistics)
        elif value is not None or not check_device_same(old.device, target):
            parameters[name] = like(old, _moved(old, value, target, dtype, non_blocking))
        elif old.is_meta and dtype is not None:
            parameters[name] = like(old, old.to(resolve_dtype(dtype)))

    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    for source in reversed(sources):
        if source.data_ptr() in tied:
            placed: Any = parameters[name]
            tied[source.data_ptr()].setdefault(device, placed)
            return


def _moved(
    old: torch.Tensor, value: torch.Tensor | None, device: torch.device, dtype: Any, non_blocking: bool
) -> torch.Tensor:
    dtype = resolve_dtype(dtype)
    if value is None:
        moved = old.to(device, non_blocking=non_blocking)
        return moved.to(dtype) if dtype is not None and moved.is_meta else moved
    # Cast over there: a device is faster at it than the host.
    moved = value.to(device, non_blocking=non_blocking)
    if dtype is None:
        return moved.to(old.dtype)
    return moved.to(dtype) if value.is_floating_point() or value.is_complex() else moved
