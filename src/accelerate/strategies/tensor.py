"""Tensor parallelism alone: every process sees the same data, and computes its part of each layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.parallel import tensor, values
from accelerate.state import AcceleratorState
from accelerate.strategies.sharded import Sharded
from accelerate.torch_internals.compile import original_of


class TensorParallel(Sharded):
    restores_unreduced = False  # all get the same data

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        self.config = state.parallelism_config
        self.mesh = state.device_mesh

    @property
    def gathers(self) -> bool:
        return False

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        inner: Any = original_of(model)
        plan = tensor.plan_of(inner, self.mesh["tp"], self.config)
        if plan is None:
            return model
        before = dict(inner.named_parameters(remove_duplicate=False))
        values.follow_rank_0(inner, self.device)
        parallelize_module(inner, self.mesh["tp"], plan)
        self.note_moved(before, inner)
        return model
