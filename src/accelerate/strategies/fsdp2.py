"""FSDP version 2, `fully_shard`: each process holds a piece of every parameter, and gathers one part at a time."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accelerate.checkpoint.state import named_parameters
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.parallel import tensor, values
from accelerate.parallel.mesh import axis_rank
from accelerate.parallel.shards import local, spread_as
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.dtensors import DTensors
from accelerate.strategies.wrapping import average_gradients, compute_twice, ignored_modules, parts


class FSDP2(DTensors):
    def __init__(
        self,
        device: torch.device,
        ddp: DistributedDataParallelKwargs,
        plugin: FullyShardedDataParallelPlugin,
        mesh: DeviceMesh,
        config: ParallelismConfig | None = None,
        whole_mesh: DeviceMesh | None = None,
    ) -> None:
        """mesh: what is sharded over. config, whole_mesh: all axes, where there are others."""
        super().__init__(device, ddp)
        self.plugin = plugin
        self.mesh = mesh
        self.config = config
        self.tensor_mesh = whole_mesh["tp"] if whole_mesh is not None and config and config.tp_enabled else None
        self.tensor_rank = axis_rank(whole_mesh, "tp")
        self._tables: weakref.WeakSet[_Aside] = weakref.WeakSet()

    # --- preparing ----------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        inner: Any = getattr(model, "_orig_mod", model)
        if isinstance(inner, FSDPModule):
            return model  # whoever loaded it has sharded it
        before = dict(inner.named_parameters(remove_duplicate=False))
        ignored = ignored_modules(self.plugin, inner)
        chosen = parts(self.plugin, inner, ignored)
        if self.plugin.activation_checkpointing:
            for part in chosen or [inner]:
                compute_twice(part, offload=self.plugin.activation_checkpointing_offload)
        kept = self._take_values(inner)
        left_out = {parameter for module in ignored for parameter in module.parameters()}
        for part in chosen:
            fully_shard(part, **self._settings(left_out))
        fully_shard(inner, **self._settings(left_out, root=inner))
        if kept is not None:
            offloads = isinstance(self.plugin.cpu_offload, CPUOffloadPolicy)
            values.give(inner, kept, self.device, torch.device("cpu") if offloads else None)
        self.note_moved(before, inner)
        inner._accelerate_syncs = True
        whole_ones = [parameter for parameter in inner.parameters() if not isinstance(parameter, DTensor)]
        average_gradients(whole_ones, lambda: inner._accelerate_syncs)
        inner._accelerate_aside = _Aside(inner)
        self._tables.add(inner._accelerate_aside)
        return model

    def _take_values(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """The weights, on rank 0, of a model that has none afterwards. None where they have to stay in it."""
        plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
        dtype = torch.float32 if self.plugin.mixed_precision_policy else None
        if plain and self.tensor_mesh is None:
            return values.take(model, dtype)
        # Tensors with a layout of their own: spread over the tensor axis, or quantized.
        values.follow_rank_0(model, self.device, dtype)
        if self.tensor_mesh is not None and self.config is not None:
            tensor.split(model, self.tensor_mesh, self.config)
        return None

    def _settings(self, left_out: set[nn.Parameter], root: nn.Module | None = None) -> dict[str, Any]:
        plugin: Any = self.plugin
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        if root is not None and "_original_forward" in vars(root):
            # Its forward hands out fp32, and nothing after it shall change that.
            policy = dataclasses.replace(policy, output_dtype=torch.float32)
        offload = plugin.cpu_offload
        if isinstance(offload, CPUOffloadPolicy) and self.device.type == "cpu":
            offload = CPUOffloadPolicy(pin_memory=False)
        return {
            "mesh": self.mesh,
            "reshard_after_forward": plugin.reshard_after_forward,
            "mp_policy": policy,
            "offload_policy": offload,
            **({"ignored_params": left_out} if left_out else {}),
        }

    # --- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        inner = getattr(model, "_orig_mod", model)
        return _sync(inner, False) if isinstance(inner, FSDPModule) else nullcontext()

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        # Without an exchange, gradients are kept as a whole beside the parameters.
        aside = [table.get(parameter) for parameter in parameters for table in self._tables]
        return super().gradients(parameters) + [gradient for gradient in aside if gradient is not None]

    def window_gradients(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        if self.tensor_mesh is not None:
            return super().window_gradients(models)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in named_parameters(models).items():
            aside = next((g for table in self._tables if (g := table.get(parameter)) is not None), None)
            sharded = isinstance(parameter, DTensor)
            own = parameter.grad if aside is None and not sharded else aside
            if own is not None:
                mean = own.detach().to(self.device, copy=True)
                dist.all_reduce(mean)
                found[name] = spread_as(mean.div_(dist.get_world_size()), parameter)
            if sharded and parameter.grad is not None:  # exchanged already
                found[name] = found[name] + parameter.grad if name in found else parameter.grad.detach()
        return found


class _Aside:
    """The gradients of one model that wait, as a whole, for the exchange at the end of a window."""

    def __init__(self, model: nn.Module) -> None:
        self._sharded: dict[int, Any] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                for group in [state._fsdp_param_group] if groups is None else groups:
                    for sharded in group.fsdp_params if group is not None else ():
                        self._sharded[id(sharded.sharded_param)] = sharded

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        sharded = self._sharded.get(id(parameter))
        if sharded is None or not hasattr(sharded, "_unsharded_param"):
            return None  # not of this model, or not used yet
        gradient = sharded.unsharded_accumulated_grad
        gradient = sharded._unsharded_param.grad if gradient is None else gradient
        return None if gradient is None else local(gradient)


@contextmanager
def _sync(model: Any, on: bool) -> Iterator[None]:
    """A context in which backward passes exchange gradients, or keep them to this process."""
    before = getattr(model, "_accelerate_syncs", True)
    model._accelerate_syncs = on
    model.set_requires_gradient_sync(on)
    try:
        yield
    finally:
        model._accelerate_syncs = before
        model.set_requires_gradient_sync(before)


def sync_in_backward(model: nn.Module) -> AbstractContextManager[Any] | None:
    """A context in which the next backward exchanges gradients; None where this is not the model's engine."""
    inner = getattr(model, "_orig_mod", model)
    return _sync(inner, True) if isinstance(inner, FSDPModule) else None
