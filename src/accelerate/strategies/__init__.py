"""How a model is spread over processes: one file per engine, chosen once per accelerator from the table below."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch

from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Outputs, Strategy
from accelerate.unwrap import add_wrappers

__all__ = ["STRATEGIES", "Outputs", "Strategy", "StrategyRow", "create", "sync_in_backward"]


class StrategyRow(NamedTuple):
    """One engine of the table. It is imported when it is chosen."""

    module: str
    name: str
    # Whether it is the engine of a process that is set up like this.
    matches: Callable[[AcceleratorState], bool]

    def load(self) -> type[Strategy]:
        strategy: type[Strategy] = getattr(import_module(self.module), self.name)
        return strategy


def _fsdp(version: int) -> Callable[[AcceleratorState], bool]:
    return lambda state: hasattr(state, "fsdp_plugin") and state.fsdp_plugin.fsdp_version == version


def _on_xla(state: AcceleratorState) -> bool:
    return state.device.type == "xla"


def _tensor_parallel(state: AcceleratorState) -> bool:
    config = state.parallelism_config
    return state.backend is not None and config is not None and config.tp_enabled


# The first that matches is taken: what was asked for, else DDP where a process group exists, else nothing at all.
STRATEGIES: list[StrategyRow] = [
    StrategyRow(
        "accelerate.strategies.xla_fsdp", "XLAFSDP", lambda state: _on_xla(state) and hasattr(state, "fsdp_plugin")
    ),
    StrategyRow("accelerate.strategies.xla", "XLAReplicated", _on_xla),
    StrategyRow("accelerate.strategies.deepspeed", "DeepSpeed", lambda state: state.deepspeed_plugins is not None),
    StrategyRow("accelerate.strategies.megatron", "Megatron", lambda state: state.megatron_lm_plugin is not None),
    StrategyRow("accelerate.strategies.fsdp1", "FSDP1", _fsdp(1)),
    StrategyRow("accelerate.strategies.fsdp2", "FSDP2", _fsdp(2)),
    StrategyRow("accelerate.strategies.tensor", "TensorParallel", _tensor_parallel),
    StrategyRow("accelerate.strategies.ddp", "DDP", lambda state: state.backend is not None),
    StrategyRow("accelerate.strategies.base", "Strategy", lambda state: True),
]


def create(state: AcceleratorState, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """The engine for this process."""
    chosen = next(row for row in STRATEGIES if row.matches(state)).load()
    add_wrappers(*chosen.wrappers)
    return chosen(state, ddp or DistributedDataParallelKwargs())


def sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context in which the next backward synchronizes, although its forward ran under `no_sync`."""
    import accelerate.strategies.ddp  # noqa: F401  # a script may have wrapped its model in DDP by itself

    # Other engines are not imported for the question's sake: while one is not, no model is its.
    for row in STRATEGIES:
        if row.module in sys.modules and (context := row.load().sync_in_backward(model)) is not None:
            return context
    return nullcontext()
