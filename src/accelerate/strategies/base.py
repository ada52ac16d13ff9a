"""How a model is spread over processes. The base class is the plain case: one device, nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate.config.handlers import DistributedDataParallelKwargs


class Strategy:
    """One engine. A method that an engine does in its own way is overridden in that engine's file."""

    def __init__(self, device: torch.device, ddp: DistributedDataParallelKwargs) -> None:
        self.device = device
        self.ddp = ddp

    def wrap(self, model: torch.nn.Module, *, placed: bool) -> torch.nn.Module:
        """The model in whatever container the engine needs. placed: whether it lies on `device` as a whole."""
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes keep their gradients to this process."""
        return nullcontext()

    def joinable(self, model: torch.nn.Module) -> bool:
        """Whether the engine can stand in for a process that has run out of data."""
        return False

    def stand_in(self, model: torch.nn.Module) -> torch.Tensor | None:
        """Run a forward that takes part in the engine's collectives and whose backward adds nothing."""
        return None

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The whole state dict of an unwrapped model."""
        return model.state_dict()
