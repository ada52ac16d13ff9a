"""The hook behind dispatched and offloaded models: inputs and weights are where a module runs, when it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from accelerate.comm.tree import find_device, send_arguments_to_device, send_to_device
from accelerate.devices.base import DeviceLike
from accelerate.hooks.base import ModelHook, SequentialHook, add_hook_to_module
from accelerate.offload.module_tensors import (
    PLACEHOLDERS,
    find_tensor,
    get_non_persistent_buffers,
    set_module_tensor_to_device,
    table_of,
)
from accelerate.offload.offloaded_weights import OffloadedWeightsLoader, full_name, without_prefixes
from accelerate.offload.parameter_kinds import is_quantized
from accelerate.offload.placeholder import casting
from accelerate.offload.slot import Slot, refuse_values
from accelerate.offload.streaming import Block, Streamer, copier_for
from accelerate.torch_internals.compile import outside_graphs
from accelerate.torch_internals.modules import add_pre_load_hook, buffers_of, parameters_of, refresh_flat_weights
from accelerate.torch_internals.offloaded_tensors import apply_of_class, replace_apply, restore_apply

# One streamer for all hooks whose weights come from the same mapping and go to the same device.
_STREAMERS: WeakValueDictionary[tuple[int, torch.device], Streamer] = WeakValueDictionary()


class AlignDevicesHook(ModelHook):
    """Bring the inputs of a module, and its weights if they are offloaded, to the device it runs on.

    Args:
        execution_device: where the module runs. None leaves inputs and weights where they are.
        offload: keep the weights elsewhere, and bring them in for each forward.
        io_same_device: send the output back to the device of the input.
        weights_map: the weights of an offloaded module by name. By default those it has now, on the CPU.
        offload_buffers: offload buffers as well. Otherwise they stay on the execution device.
        place_submodules: do all this for the submodules as well.
        skip_keys: keyword arguments of the forward (and keys of its output) that are not moved.
        tied_params_map: tensors that several modules share, by address and then by device.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        # Tensors that stay on the device although the others are offloaded.
        self.resident: set[str] = set()
        # The forward of a whole model begins and ends with its outermost hook: who wants to know (see `watch`).
        self._watchers: list[Streamer] = []
        self._streamer: Streamer | None = None
        self._block: Block | None = None
        self._quantized: list[str] = []
        self._handles: list[Any] = []
        self._lists: list[nn.RNNBase] = []

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            self._init_offload(module)
        elif self.execution_device is not None:
            placed: dict[int, torch.Tensor] = {}
            for name, tensor in _tensors(module, self.place_submodules).items():
                holder, attribute = find_tensor(module, name)
                table = table_of(holder, attribute)
                if id(tensor) in placed:  # another name of one that was placed
                    table[attribute] = placed[id(tensor)]
                else:
                    self._place(module, name)
                    placed[id(tensor)] = table[attribute]
        return module

    def _place(self, module: nn.Module, name: str, **kwargs: Any) -> None:
        assert self.execution_device is not None
        tied = None if torch.device(self.execution_device).type == "meta" else self.tied_params_map
        set_module_tensor_to_device(
            module, name, self.execution_device, tied_params_map=tied, clear_cache=False, **kwargs
        )

    def _init_offload(self, module: nn.Module) -> None:
        tensors = _tensors(module, self.place_submodules)
        self.original_devices = {name: _home_device(tensor) for name, tensor in tensors.items()}
        left_alone = get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        if not self.offload_buffers:
            buffers = module.named_buffers(recurse=self.place_submodules, remove_duplicate=False)
            left_alone |= {name for name, _ in buffers}
        left_alone |= self.resident
        offloaded = [name for name in tensors if name not in left_alone]
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        elif isinstance(without_prefixes(self.weights_map)[0], (dict, OffloadedWeightsLoader)):
            refuse_values({name: tensors[name] for name in offloaded}, self.weights_map)
        if self.execution_device is not None:
            for name in tensors:
                if name in left_alone:
                    self._place(module, name, value=self.weights_map.get(name) if tensors[name].is_meta else None)
        self._quantized = [name for name in offloaded if is_quantized(tensors[name])]
        for name in self._quantized:
            set_module_tensor_to_device(module, name, "meta")
        self._make_block(module, [name for name in offloaded if name not in self._quantized])

    def _make_block(self, module: nn.Module, names: list[str]) -> None:
        assert self.weights_map is not None
        device = torch.device("cpu" if self.execution_device is None else self.execution_device)
        slots = [
            Slot(
                *find_tensor(module, name), self.weights_map, name, self.execution_device, device, self.tied_params_map
            )
            for name in names
        ]
        for slot in slots:
            slot.home = self.original_devices[slot.name]
        self._block = Block(slots)
        self._streamer = streamer_for(self.weights_map, device)
        self._streamer.add(self._block)
        holders = dict.fromkeys(slot.holder for slot in slots)
        for holder in holders:
            # By the method of the base class: modules of TorchScript refuse, and could do it.
            self._handles.append(nn.Module.register_state_dict_post_hook(holder, _fill_in))
            self._handles.append(add_pre_load_hook(holder, take_over))
            # What `to`, `cuda` and their likes call, on this module and on those around it.
            replace_apply(holder, functools.partial(_apply, holder))
        self._lists = [holder for holder in holders if isinstance(holder, nn.RNNBase)]
        self._forget()

    def _forget(self) -> None:
        """Update the list that RNNs keep of their weights: it must not keep offloaded ones alive."""
        for holder in self._lists:
            refresh_flat_weights(holder)

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        try:
            for streamer in self._watchers:
                streamer.begin(id(self))
            if self._block is not None and self._streamer is not None:
                self._streamer.enter(self._block)
            for name in self._quantized:
                self._bring_quantized(module, name)
            if self.execution_device is not None:
                args = send_arguments_to_device(args, self.execution_device)
                if kwargs:
                    kwargs = send_arguments_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)
        except BaseException:
            self.after_error(module)
            raise
        return args, kwargs

    def cast_placeholders(self, dtype: torch.dtype) -> None:
        """Offload weights that are in the module now in another dtype from now on.

        Args:
            dtype: the dtype.
        """
        for slot in [] if self._block is None else self._block.slots:
            if slot.placeholder.is_floating_point():
                slot.placeholder.data = slot.placeholder.to(dtype)

    @contextlib.contextmanager
    def brought_in(self, module: nn.Module, device: torch.device | None = None) -> Iterator[None]:
        """Bring in the offloaded tensors inside a `with` block, outside of a forward.

        Args:
            module: the module.
            device: where to. By default the device the module runs on.
        """
        missing = [] if self._block is None else self._block.missing()
        brought = [(slot, slot.fill(slot.host().detach().to(device or slot.device))) for slot in missing]
        for name in self._quantized:
            self._bring_quantized(module, name)
        try:
            yield
        finally:
            for slot, tensor in brought:
                slot.clear(tensor)
            self._forget()
            for name in self._quantized:
                set_module_tensor_to_device(module, name, "meta")

    def _bring_quantized(self, module: nn.Module, name: str) -> None:
        assert self.weights_map is not None and self.execution_device is not None
        value = self.weights_map[name]
        scales = name.replace("weight", "SCB")
        has_scales = value.dtype == torch.int8 and scales != name and scales in self.weights_map
        statistics = self.weights_map[scales] if has_scales else None
        set_module_tensor_to_device(
            module, name, self.execution_device, value=value, fp16_statistics=statistics, clear_cache=False
        )

    @outside_graphs
    def after_error(self, module: nn.Module) -> None:
        if self._block is not None and self._streamer is not None:
            self._streamer.leave(self._block)
            self._forget()
        for name in self._quantized:
            set_module_tensor_to_device(module, name, "meta")
        for streamer in self._watchers:
            streamer.end()

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.after_error(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if not self.offload:
            return module
        slots: dict[str, Slot] = {}
        if self._block is not None and self._streamer is not None:
            self._streamer.discard(self._block)
            for slot in self._block.slots:
                restore_apply(slot.holder)
                slots[slot.name] = slot
        for handle in self._handles:
            handle.remove()
        self._handles, self._block, self._quantized, self._lists = [], None, [], []
        for name, device in self.original_devices.items():
            if device.type != "meta" and name in slots:
                slots[name].put_back(device)
            elif device.type != "meta":
                value = None if self.weights_map is None else self.weights_map.get(name)
                set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
        return module


def streamer_for(weights: Mapping[str, Any], device: torch.device) -> Streamer:
    """Return the streamer of a mapping of weights, which all hooks with this mapping share."""
    root, _ = without_prefixes(weights)
    key = id(root), device
    streamer = _STREAMERS.get(key)
    if streamer is None:
        # It keeps the mapping alive: the key is valid for as long as that is.
        streamer = _STREAMERS[key] = Streamer(copier_for(device), root)
    return streamer


def watch(model: nn.Module) -> None:
    """Tell the streamers of a model when its forward begins and ends, and that it is ready to run.

    The parts of a model tell them too: it may have other methods than `forward`, which call these.
    """
    streamers = _streamers(model)
    first = next(iter(align_hooks(model)), None)
    if first is not None:
        first._watchers = list(dict.fromkeys(streamers))
    for part in _parts(model):
        inside = _streamers(part)
        if len(inside) < 2:  # there is nothing ahead within it
            continue
        if not align_hooks(part):
            add_hook_to_module(part, AlignDevicesHook(), append=True)
        align_hooks(part)[0]._watchers = list(dict.fromkeys(inside))
    for streamer in dict.fromkeys(streamers):
        streamer.prepare()


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """What the methods of a model can call."""
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(part)
        else:
            yield part


def _streamers(model: nn.Module) -> list[Streamer]:
    """Those of all modules, as often as they are used."""
    hooks = (hook for module in model.modules() for hook in align_hooks(module))
    return [hook._streamer for hook in hooks if hook._streamer is not None]


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of this kind that a module has, in the order in which they run."""
    hooks: list[Any] = [getattr(module, "_hf_hook", None)]
    while any(isinstance(hook, SequentialHook) for hook in hooks):
        hooks = [part for hook in hooks for part in getattr(hook, "hooks", (hook,))]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def _tensors(module: nn.Module, recurse: bool) -> dict[str, torch.Tensor]:
    """Return all tensors of a module by name; one with several names is there several times."""
    parts = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{path}.{name}" if path else name: tensor
        for path, part in parts
        for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items())
        if tensor is not None
    }


def _home_device(tensor: Any) -> torch.device:
    """Return the device of a tensor, or the one it had before it was offloaded."""
    device: torch.device = tensor.slot.home if isinstance(tensor, PLACEHOLDERS) else tensor.device
    return device


def _fill_in(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace offloaded entries of a state dict by their values: in memory, or mapped from their file."""
    for attribute in (*parameters_of(module).keys(), *buffers_of(module).keys()):
        entry = state_dict.get(f"{prefix}{attribute}")
        # With keep_vars the entry is the parameter itself.
        if isinstance(entry, PLACEHOLDERS) and entry is not table_of(module, attribute)[attribute]:
            state_dict[f"{prefix}{attribute}"] = entry.slot.host().detach().to(entry.dtype)


def _apply(module: nn.Module, function: Callable[[torch.Tensor], Any], *args: Any, **kwargs: Any) -> nn.Module:
    """Postpone casts of a module until its weights are used, and refuse what would need all of them in memory."""

    def checked(tensor: torch.Tensor) -> Any:
        result = function(tensor)
        if not isinstance(tensor, PLACEHOLDERS):
            return result
        if not isinstance(result, PLACEHOLDERS):
            name = full_name(tensor.slot.weights, tensor.slot.name)
            raise RuntimeError(
                f"This {type(module).__name__} cannot be moved: {name} is in host memory or on disk, and is loaded "
                "when it is used; call `remove_hook_from_submodules` on the model first, or offload it with another "
                "device."
            )
        tensor.data = result
        return tensor

    with casting():
        return apply_of_class(module, checked, *args, **kwargs)


def take_over(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load values to where the weights are; torch would take these for empty, and warn."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    for attribute, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        key = f"{prefix}{attribute}"
        value = state_dict.get(key)
        if not isinstance(tensor, PLACEHOLDERS) or not isinstance(value, torch.Tensor):
            continue
        if value.shape == tensor.shape and not value.is_meta:
            try:
                with torch.no_grad():
                    tensor.copy_(value)
            except RuntimeError as error:
                error_msgs.append(str(error))
            state_dict[key] = tensor
