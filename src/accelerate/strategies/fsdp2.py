"""FSDP version 2, `fully_shard`: each process holds a piece of every parameter, and gathers one part at a time."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.checkpoint.run_state import named_parameters
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.parallel import tensor, values
from accelerate.parallel.mesh import axis_rank, sharding_mesh
from accelerate.parallel.shards import complete, local, spread_as, whole
from accelerate.state import AcceleratorState
from accelerate.strategies import fsdp_tools
from accelerate.strategies.sharded import Sharded
from accelerate.strategies.wrapping import average_gradients, compute_twice, ignored_modules, parts
from accelerate.torch_internals.compile import original_of
from accelerate.torch_internals.fsdp2 import WaitingGradients


def _check_torch(device: torch.device, leaves_out: bool) -> None:
    """Say what `fully_shard` cannot do yet in this release of torch."""
    if device.type == "cpu" and not (hasattr(torch.cpu.Stream, "record_event") and _gloo_takes_means()):
        raise RuntimeError(
            f"FSDP version 2 does not run on CPUs with torch {torch.__version__}: update torch, or use FSDP version 1."
        )
    if leaves_out and "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise RuntimeError(
            "FSDP version 2 can leave parameters unsharded (those of `ignored_modules`, and those without a "
            f"dimension) only since torch 2.7, but this is {torch.__version__}: update torch, or use FSDP version 1."
        )


def _gloo_takes_means() -> bool:
    """Older ones add up the gradients that they are told to average, without a word."""
    mean = torch.zeros(1)
    # Its name since torch 2.13, which warns of the one before.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(mean, torch.ones(dist.get_world_size()), op=dist.ReduceOp.AVG)
    return mean.item() == 1.0


class FSDP2(Sharded):
    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        config, whole_mesh = state.parallelism_config, state.device_mesh
        self.plugin = state.fsdp_plugin
        self.mesh = sharding_mesh(config, whole_mesh, state.device)  # what is sharded over
        self.config = config
        self.tensor_mesh = whole_mesh["tp"] if whole_mesh is not None and config and config.tp_enabled else None
        self.tensor_rank = axis_rank(whole_mesh, "tp")
        # On an axis inside, a process has accumulated for a part of each layer only.
        self.restores_unreduced = self.tensor_mesh is None
        self._tables: weakref.WeakSet[WaitingGradients] = weakref.WeakSet()

    # --- preparing ----------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        # Looked up where scripts put a function of their own.
        if fsdp_tools.fsdp2_prepare_model is fsdp_tools.OWN_PREPARE_MODEL:
            return self.shard(model)
        before = dict(original_of(model).named_parameters(remove_duplicate=False))
        model = fsdp_tools.fsdp2_prepare_model(self.accelerator(), model)
        self.note_moved(before, original_of(model))
        return self.shard(model)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place, unless that was done."""
        inner: Any = original_of(model)
        if isinstance(inner, FSDPModule):  # whoever loaded it has sharded it
            self._note(inner)
            return model
        before = dict(inner.named_parameters(remove_duplicate=False))
        plan = None if self.tensor_mesh is None else tensor.plan_of(inner, self.tensor_mesh, self.config)
        ignored = ignored_modules(self.plugin, inner)
        _check_torch(self.device, bool(ignored) or not all(parameter.ndim for parameter in inner.parameters()))
        chosen = parts(self.plugin, inner, ignored)
        if self.plugin.activation_checkpointing:
            for part in chosen or [inner]:
                compute_twice(part, offload=self.plugin.activation_checkpointing_offload)
        kept = self._take_values(inner, plan, ignored)
        left_out = {parameter for module in ignored for parameter in module.parameters()}
        left_out |= {parameter for parameter in inner.parameters() if not parameter.ndim}  # nothing to cut
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
        self._note(inner)
        return model

    def _note(self, inner: Any) -> None:
        inner._accelerate_aside = WaitingGradients(inner)
        self._tables.add(inner._accelerate_aside)

    def _take_values(
        self, model: nn.Module, plan: tensor.Styles | None, ignored: Collection[nn.Module]
    ) -> dict[str, torch.Tensor] | None:
        """The weights, on rank 0, of a model that has none afterwards. None where they have to stay in it."""
        plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
        dtype = torch.float32 if self.plugin.mixed_precision_policy else None
        if plain and self.tensor_mesh is None:
            kept = values.take(model, dtype)
            self.precision.before_sharding(model, ignored)
            return kept
        # Tensors with a layout of their own: spread over the tensor axis, or quantized.
        values.follow_rank_0(model, self.device, dtype)
        self.precision.before_sharding(model, ignored)
        if plan is not None:
            parallelize_module(model, self.tensor_mesh, plan)
        return None

    def _settings(self, left_out: set[nn.Parameter], root: nn.Module | None = None) -> dict[str, Any]:
        plugin: Any = self.plugin
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        if root is not None and "_original_forward" in vars(root):
            # Its forward hands out fp32, which nothing after it must change.
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

    def micro_batch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any] | None:
        inner = original_of(model)
        return _sync(inner, False) if not sync and isinstance(inner, FSDPModule) else None

    @classmethod
    def sync_in_backward(cls, model: nn.Module) -> AbstractContextManager[Any] | None:
        inner = original_of(model)
        return _sync(inner, True) if isinstance(inner, FSDPModule) else None

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        # Without an exchange, gradients are kept as a whole beside the parameters.
        unreduced = (self._unreduced(parameter) for parameter in parameters)
        return super().gradients(parameters) + [local(gradient) for gradient in unreduced if gradient is not None]

    def _unreduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return next((found for table in self._tables if (found := table.get(parameter)) is not None), None)

    # --- in the middle of a window ------------------------------------------------------------------------------

    def unreduced_gradients(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in named_parameters(models).items():
            sharded = isinstance(parameter, DTensor)
            gradient = self._unreduced(parameter) if sharded else parameter.grad
            if gradient is not None and (self.restores_unreduced or not sharded):
                found[name] = gradient.detach()
        return found

    def reduced_gradients(self, models: list[nn.Module]) -> dict[str, Any] | None:
        found = {}
        for name, parameter in named_parameters(models).items():
            if isinstance(parameter, DTensor):
                unreduced = None if self.restores_unreduced else self._unreduced(parameter)
                parts = [] if parameter.grad is None else [parameter.grad.detach()]
                parts += [] if unreduced is None else [spread_as(self._mean(unreduced), parameter)]
                if parts:
                    found[name] = sum(parts[1:], parts[0])
        return found or None

    def _mean(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over the processes that get different data, as a whole."""
        mean = gradient.detach().clone()
        for axis in range(self.mesh.ndim):
            dist.all_reduce(local(mean), group=self.mesh.get_group(axis))
        return whole(complete(mean)) / self.mesh.size()

    def put_gradients(
        self, models: list[nn.Module], unreduced: dict[str, torch.Tensor], reduced: dict[str, torch.Tensor]
    ) -> None:
        parameters = named_parameters(models)
        sharded = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
        super().put_gradients(models, {n: g for n, g in unreduced.items() if n not in sharded}, reduced)
        policy: Any = self.plugin.mixed_precision_policy or MixedPrecisionPolicy()
        for name in sharded:
            parameter, gradient = parameters[name], unreduced.get(name)
            if gradient is not None:
                gradient = gradient.to(self.device, policy.reduce_dtype or policy.param_dtype or parameter.dtype)
            for table in self._tables:
                table.put(parameter, gradient)


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
