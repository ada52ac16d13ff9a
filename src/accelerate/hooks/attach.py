"""Putting hooks on all modules of a model that need one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.devices.base import DeviceLike
from accelerate.hooks.align import AlignDevicesHook, align_hooks
from accelerate.hooks.base import add_hook_to_module
from accelerate.offload.module_tensors import named_module_tensors, set_module_tensor_to_device
from accelerate.offload.offloaded_weights import PrefixedDataset
from accelerate.torch_internals.modules import buffers_of, non_persistent_buffers, parameters_of

Tied = dict[int, dict[Any, torch.Tensor]]


def _dotted(module_name: str, child: str) -> str:
    return f"{module_name}.{child}" if module_name else child


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> None:
    """Make all submodules that have weights, and no hook yet, bring their inputs to a device.

    Args:
        module: the module.
        execution_device: the device.
        skip_keys: keyword arguments of the forward that are not moved.
        preload_module_classes: names of classes whose submodules get no hooks.
        tied_params_map: tensors that several modules share, by address and then by device.
    """
    if not hasattr(module, "_hf_hook") and _has_state(module):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def _has_state(module: nn.Module) -> bool:
    return any(
        len(parameters_of(part)) > 0 or not non_persistent_buffers(part) >= set(buffers_of(part).keys())
        for part in module.modules()
    )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> None:
    """Add an `AlignDevicesHook` to each submodule that has weights itself.

    Args:
        module: the module.
        execution_device: where it runs.
        offload: keep the weights elsewhere, and bring them in for each forward.
        weights_map: the weights by name. By default those that the modules have now, on the CPU.
        offload_buffers: offload buffers as well.
        module_name: the name of the module in `weights_map`.
        skip_keys: keyword arguments of the forward that are not moved.
        preload_module_classes: names of classes whose weights are brought in all at once, submodules included, because
            their forward uses weights of submodules directly.
        tied_params_map: tensors that several modules share, by address and then by device.
    """

    def visit(part: nn.Module, name: str) -> None:
        named = type(part).__name__ in (preload_module_classes or ())
        # The hooks inside of a module of TorchScript would never run.
        at_once = offload and (named or isinstance(part, torch.jit.ScriptModule))
        if at_once or any(True for _ in named_module_tensors(part)):
            prefix = f"{name}." if name else ""
            hook = AlignDevicesHook(
                execution_device=execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
                offload_buffers=offload_buffers,
                place_submodules=at_once,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(part, hook, append=True)
        if not at_once:
            for child_name, child in part.named_children():
                visit(child, _dotted(name, child_name))

    visit(module, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> None:
    """Add an `AlignDevicesHook` to the modules that a device map names.

    Args:
        module: the model.
        execution_device: where modules run, by name, or one device for all.
        offload: whether the weights of modules are kept elsewhere, by name, or one answer for all.
        weights_map: the weights by name.
        offload_buffers: offload buffers as well.
        module_name: the name of `module` in the maps.
        skip_keys: keyword arguments of the forward that are not moved.
        preload_module_classes: as in `attach_align_device_hook`.
        tied_params_map: tensors that several modules share, by address and then by device.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module,
                execution_device,
                True,
                weights_map,
                offload_buffers,
                module_name,
                preload_module_classes=preload_module_classes,
                **common,
            )
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **common)
            add_hook_to_module(module, hook, append=True)
        return
    _Blocks(
        _by_name(execution_device, offload),
        _by_name(offload, execution_device),
        offload_buffers,
        weights_map,
        preload_module_classes,
        common,
    ).visit(module, module_name)


def _by_name(value: Any, names: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else dict.fromkeys(names, value)


@dataclass
class _Blocks:
    """Walk over a model, and add hooks to the modules of a device map.

    A module or tensor without an entry has that of the closest module around it. common: what every hook gets.
    """

    execution_device: Mapping[str, Any]
    offload: Mapping[str, bool]
    offload_buffers: bool
    weights_map: Any
    preload_module_classes: list[str] | None
    common: dict[str, Any]

    def __post_init__(self) -> None:
        # Modules in which something has an entry of its own.
        self.mixed: set[str] = set()
        for name in self.execution_device.keys() & self.offload.keys():
            while name:
                name = name.rpartition(".")[0]
                self.mixed.add(name)

    def visit(self, module: nn.Module, name: str, around: str | None = None) -> None:
        """around: the closest entry around this module."""
        entry = self._entry(name, around)
        if entry is not None and name not in self.mixed:
            self._block(module, name, entry)
            return
        self._own(module, name, entry)
        for child_name, child in module.named_children():
            self.visit(child, _dotted(name, child_name), entry)

    def _entry(self, name: str, around: str | None) -> str | None:
        return name if name in self.execution_device and name in self.offload else around

    def _block(self, module: nn.Module, name: str, entry: str) -> None:
        """Add hooks to a module that is in one place as a whole."""
        device: Any = self.execution_device[entry]
        if self.offload[entry]:
            self._offloaded(module, name, device)
        else:
            hook = AlignDevicesHook(
                device,
                io_same_device=name == "",
                offload_buffers=self.offload_buffers,
                place_submodules=True,
                **self.common,
            )
            add_hook_to_module(module, hook)
            attach_execution_device_hook(module, device, **self.common)

    def _own(self, module: nn.Module, name: str, entry: str | None) -> None:
        """Add a hook for the tensors that a module has directly; its submodules have entries themselves."""
        own = (*parameters_of(module).items(), *buffers_of(module).items())
        tensors = [key for key, tensor in own if tensor is not None]
        places = {key: self._entry(_dotted(name, key), entry) for key in tensors}
        resident = {key for key, place in places.items() if place is None or not self.offload[place]}
        device: Any = self.execution_device.get("" if entry is None else entry)
        if len(resident) < len(tensors):
            weights = PrefixedDataset(self.weights_map, f"{name}." if name else "")
            hook = AlignDevicesHook(
                device,
                offload=True,
                io_same_device=name == "",
                weights_map=weights,
                offload_buffers=self.offload_buffers,
                **self.common,
            )
            hook.resident = resident
            add_hook_to_module(module, hook, append=True)
        elif entry is not None or name == "":
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=name == "", **self.common), append=True)
        else:
            tied = self.common["tied_params_map"]
            for key, place in places.items():
                if place is not None:
                    target = self.execution_device[place]
                    set_module_tensor_to_device(module, key, target, tied_params_map=tied, clear_cache=False)

    def _offloaded(self, module: nn.Module, name: str, device: Any) -> None:
        attach_align_device_hook(
            module,
            execution_device=device,
            offload=True,
            weights_map=self.weights_map,
            offload_buffers=self.offload_buffers,
            module_name=name,
            preload_module_classes=self.preload_module_classes,
            **self.common,
        )
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, **self.common))
        if name == "":
            align_hooks(module)[0].io_same_device = True
        attach_execution_device_hook(module, device, preload_module_classes=self.preload_module_classes, **self.common)
