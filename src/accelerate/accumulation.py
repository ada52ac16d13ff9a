"""Gradient accumulation: when to synchronise, and what the gradients of a window are divided by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from accelerate.comm import current
from accelerate.state import GradientState
from accelerate.strategies import Strategy


class Accumulation:
    """The window of micro-batches of one accelerator.

    Micro-batches are counted per set of models, so that two models trained in turns each have their own window.
    """

    def __init__(self, state: GradientState, strategy: Strategy) -> None:
        self.state = state
        self.strategy = strategy
        self.counts: dict[tuple[int, ...], int] = {}

    def reset(self) -> None:
        self.counts.clear()

    def next_micro_batch(self, models: tuple[Any, ...]) -> bool:
        """Count one more micro-batch for these models and say whether gradients are synchronised at it."""
        state = self.state
        loader = state.active_dataloader
        if loader is not None and loader.ends_everywhere and state.sync_with_dataloader:
            self.counts.pop(_key(models), None)
            state._set_sync_gradients(True)
            return True
        steps = state.num_steps
        if steps == 1:
            state._set_sync_gradients(True)
            return True
        key = _key(models)
        count = self.counts[key] = self.counts.get(key, 0) + 1
        sync = count % steps == 0
        state._set_sync_gradients(sync)
        return sync


def _key(models: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(id(model) for model in models)


class Accumulating(AbstractContextManager[None]):
    """What `accelerator.accumulate(*models)` returns: `no_sync` around all but the last micro-batch of a window."""

    def __init__(self, accumulation: Accumulation, models: tuple[Any, ...]) -> None:
        self._accumulation = accumulation
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        accumulation = self._accumulation
        sync = accumulation.next_micro_batch(self._models)
        if not sync and not accumulation.state.sync_each_batch:
            for model in self._models:
                context = accumulation.strategy.no_sync(model)
                context.__enter__()
                self._contexts.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(kind, error, traceback)


class ItemWindow:
    """Makes the gradients of a window those of the mean over all its items, on all ranks.

    Each rank adds up the gradients of its summed losses and counts its items. Only when the window closes are the
    items of all ranks known: then the gradients, which the engine has averaged over the ranks, are multiplied by
    `ranks / items`. To keep them in range until then, losses are multiplied by `factor`, a power of two (which costs
    no accuracy) near the previous window's value. A further loss after the window has closed, before the optimizer
    steps, is taken up in the same way.
    """

    def __init__(self) -> None:
        self.items = 0.0
        self.factor = 1.0
        self.is_open = False
        self._start = 1.0

    def begin(self) -> None:
        """A new window: called when an optimizer has stepped."""
        self.items = 0.0
        self.factor = self._start
        self.is_open = False

    def add(self, num_items: int | float | torch.Tensor) -> None:
        """Count the items of one more loss."""
        count = float(num_items)
        if not math.isfinite(count) or count < 0:
            raise ValueError(
                f"num_items is {count} on rank {current().rank}: give the number of items that the loss is a sum over."
            )
        self.items += count
        self.is_open = True

    def close(self, gradients: Iterable[torch.Tensor]) -> None:
        """Exchange the counts and bring the gradients to the mean over all items."""
        communicator = current()
        total = self.items
        if communicator.size > 1:
            total = communicator.all_reduce(torch.tensor([total], dtype=torch.float64)).item()
        if total == 0:
            raise ValueError("num_items is 0 on all ranks for a whole window: there is nothing to take the mean over.")
        wanted = communicator.size / total
        tensors = list(gradients)
        if tensors:
            torch._foreach_mul_(tensors, wanted / self.factor)
        self.factor = wanted
        self._start = 2.0 ** round(math.log2(wanted))
