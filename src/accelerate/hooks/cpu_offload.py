"""Whole modules that wait on the CPU and are moved to the device when they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.comm.tree import send_arguments_to_device
from accelerate.hooks.base import ModelHook, remove_hook_from_module
from accelerate.memory import clear_device_cache
from accelerate.offload.module_tensors import with_index
from accelerate.state import PartialState
from accelerate.torch_internals.compile import outside_graphs
from accelerate.torch_internals.modules import buffers_of, parameters_of


class CpuOffload(ModelHook):
    """Keep a module on the CPU until it is called, then leave it on the device.

    Args:
        execution_device: where it runs. By default the first accelerator of this machine.
        prev_module_hook: the hook that `cpu_offload_with_hook` returned for the module that runs before this one. That
            module leaves the device first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: str | int | torch.device = (
            execution_device if execution_device is not None else PartialState().default_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None and _is_elsewhere(self.prev_module_hook.model):
            self.prev_module_hook.offload()
            clear_device_cache()
        if not _is_on(module, with_index(self.execution_device)):
            module.to(self.execution_device)
        device = self.execution_device
        return send_arguments_to_device(args, device), send_arguments_to_device(kwargs, device)


def _is_on(module: nn.Module, device: torch.device) -> bool:
    """Tell whether all tensors of a module are on a device, in a tenth of the time that `to` takes to do nothing."""
    return all(
        tensor is None or tensor.device == device
        for part in module.modules()
        for table in (parameters_of(part), buffers_of(part))
        for tensor in table.values()
    )


def _is_elsewhere(module: nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is not None and first.device.type != "cpu"


class UserCpuOffloadHook:
    """Control a model that `cpu_offload_with_hook` offloads.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook, which ends the offload."""
        remove_hook_from_module(self.model)
