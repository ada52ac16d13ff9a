"""How a model is spread over processes: one file per engine, chosen once per accelerator."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.strategies import ddp as _ddp
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DDP

__all__ = ["DDP", "Strategy", "create", "sync_in_backward"]


def create(state: AcceleratorState, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """The engine for this process: what was asked for, else DDP where a process group exists, else nothing at all."""
    ddp = ddp or DistributedDataParallelKwargs()
    if state.backend is None:
        return Strategy(state.device, ddp)
    if hasattr(state, "fsdp_plugin"):
        return _fsdp(state, ddp)
    if state.parallelism_config is not None and state.parallelism_config.tp_enabled:
        from accelerate.strategies.tensor import TensorParallel

        return TensorParallel(state.device, ddp, state.parallelism_config, state.device_mesh)
    return DDP(state.device, ddp)


def _fsdp(state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> Strategy:
    from accelerate.parallel.mesh import machines_mesh, sharding_mesh
    from accelerate.strategies.fsdp1 import FSDP1
    from accelerate.strategies.fsdp2 import FSDP2

    plugin = state.fsdp_plugin
    if plugin.fsdp_version == 1:
        shards, machines = sharding_mesh(None, None, state.device), machines_mesh(state.device, state.world.local_size)
        return FSDP1(state.device, ddp, plugin, (shards, machines))
    config, mesh = state.parallelism_config, state.device_mesh
    return FSDP2(state.device, ddp, plugin, sharding_mesh(config, mesh, state.device), config, mesh)


def sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context in which the next backward synchronises, although its forward ran under `no_sync`."""
    # Not imported for the question's sake: while an engine is not, no model is its.
    others = [sys.modules.get(f"{__name__}.{name}") for name in ("fsdp1", "fsdp2")]
    for engine in (_ddp, *filter(None, others)):
        context: AbstractContextManager[Any] | None = engine.sync_in_backward(model)
        if context is not None:
            return context
    return nullcontext()
