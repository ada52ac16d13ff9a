"""How a model is spread over processes: one file per engine, chosen once per accelerator."""

from __future__ import annotations

from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.state import PartialState
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DDP

__all__ = ["DDP", "Strategy", "create"]


def create(state: PartialState, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """The engine for this process: DDP where a process group exists, else nothing at all."""
    kind = Strategy if state.backend is None else DDP
    return kind(state.device, ddp or DistributedDataParallelKwargs())
