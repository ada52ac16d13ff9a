"""FSDP on XLA devices, by SPMD: one process writes its program for one device, and XLA spreads it over all of them.

Models stay what they are. Their parameters are marked as cut along one dimension, batches along the first, and so are
the outputs of each block: between them XLA gathers the parameters of a block when it is computed, and scatters its
gradients. States of optimizers are cut like their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, StagedLoad
from accelerate.comm.tree import recursively_apply
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.devices import spmd
from accelerate.devices.spmd import Sharding
from accelerate.errors import Unfit
from accelerate.state import AcceleratorState
from accelerate.strategies.wrapping import ignored_modules, parts, replace_forward
from accelerate.strategies.xla import XLAReplicated


class XLAFSDP(XLAReplicated):
    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        self.plugin = state.fsdp_plugin
        if state.num_processes > 1:
            raise Unfit(
                "FSDP on XLA devices uses one process for all chips of one machine, but there are "
                f"{state.num_processes} processes: start one (`accelerate launch --tpu --use_fsdp --num_processes "
                "1`), or train without FSDP."
            )
        if not spmd.is_on():
            raise Unfit(
                "A device of torch_xla was in use before FSDP was set up, so it is too late to shard over all of "
                "them: create the Accelerator first, launch with `--use_fsdp`, or begin the script with "
                "`torch_xla.runtime.use_spmd()`."
            )
        self._sharding = Sharding.of_all_devices()

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        if not placed:
            return model
        ignored = ignored_modules(self.plugin, model)
        whole = {id(p) for module in ignored for p in module.parameters()}
        blocks = parts(self.plugin, model, ignored)
        for parameter in model.parameters():
            if id(parameter) not in whole:
                self._sharding.cut(parameter, self._dimension(parameter))
        for block in (*blocks, model):
            block.register_forward_hook(self._cut_output)
            if block is not model and (self.plugin.activation_checkpointing or self.plugin.xla_fsdp_grad_ckpt):
                replace_forward(block, _compute_twice)
            self._sharding.separate_backward(block)
        return model

    def _dimension(self, tensor: torch.Tensor) -> int:
        """The dimension that a parameter is cut along: its longest, of those that have a piece for every device."""
        if (self.plugin.xla_fsdp_settings or {}).get("shard_param_on_dim_0"):
            return 0
        shape = tensor.shape
        even = [dim for dim, size in enumerate(shape) if size % self._sharding.devices == 0]
        return max(even or range(len(shape)), key=lambda dim: shape[dim], default=0)

    def _cut_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        recursively_apply(self._sharding.cut_batch, output)

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        staged = super().load(run, reader, torch_load=torch_load, **kwargs)

        def apply_in_place() -> None:
            staged.apply_in_place()
            for optimizer in run.optimizers_to_load:
                self._cut_states(optimizer)

        return StagedLoad(apply_in_place, staged.apply_fallible)

    def _cut_states(self, optimizer: Any) -> None:
        """States come from a file as a whole; those of the size of their parameter are cut like it."""
        for parameter, states in optimizer.state.items():
            for value in states.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self._sharding.cut_like(value, parameter)


def _compute_twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that keeps only its inputs for the backward, by torch_xla's function: XLA would see that it computes
    the same twice, and keep the first result."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch_xla.utils.checkpoint import checkpoint

        return checkpoint(functools.partial(forward, **kwargs), *args)

    return run
