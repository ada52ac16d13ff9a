"""Gradient accumulation: when to synchronize, and what the gradients of a window are divided by."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from accelerate.comm import current
from accelerate.state import GradientState
from accelerate.strategies import Strategy


class Accumulation:
    """The window of micro-batches of one accelerator.

    Micro-batches are counted per set of models, so that two models trained in turns each have their own window.
    step: how many there were, for all models together, since a loader last came to its end.
    """

    def __init__(self, state: GradientState, strategy: Strategy) -> None:
        self.state = state
        self.strategy = strategy
        self.counts: dict[tuple[int, ...], int] = {}
        self.step: int = 0

    def reset(self) -> None:
        self.counts.clear()
        self.step = 0

    def next_micro_batch(self, models: tuple[Any, ...]) -> bool:
        """Count one more micro-batch for these models and say whether gradients are synchronized at it."""
        state = self.state
        loader = state.active_dataloader
        if loader is not None and loader.ends_everywhere and state.sync_with_dataloader:
            self.counts.pop(_key(models), None)
            self.step = 0
            sync = True
        else:
            self.step += 1
            steps = state.num_steps
            sync = steps == 1
            if not sync:
                key = _key(models)
                count = self.counts[key] = self.counts.get(key, 0) + 1
                sync = count % steps == 0
        state._set_sync_gradients(sync)
        return sync


def _key(models: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(id, models))


class Accumulating(ContextDecorator, AbstractContextManager[None]):
    """What `accelerator.accumulate(*models)` returns: gradients are synchronized at the last micro-batch of a window.

    For a block, or as the decorator of a function that takes one micro-batch.
    """

    def __init__(self, accumulation: Accumulation, models: tuple[Any, ...]) -> None:
        self._accumulation = accumulation
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        accumulation = self._accumulation
        sync = accumulation.next_micro_batch(self._models) or accumulation.state.sync_each_batch
        for model in self._models:
            context = accumulation.strategy.micro_batch(model, sync=sync)
            if context is not None:
                context.__enter__()
                self._contexts.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(kind, error, traceback)


@dataclass(eq=False)
class ItemWindow:
    """The items behind the gradients of one set of parameters, since its optimizer has last stepped.

    scale: what the gradients are multiplied by at present, None while there are none.
    closed: whether the window is complete, and that the final scale.
    """

    items: float = 0.0
    scale: float | None = None
    closed: bool = False

    def begin(self) -> None:
        self.items, self.scale, self.closed = 0.0, None, False

    def rescale(self, strategy: Strategy, parameters: list[torch.Tensor], scale: float) -> None:
        assert self.scale is not None
        if scale != self.scale:
            strategy.scale_gradients(parameters, scale / self.scale)
        self.scale = scale


class ItemWindows:
    """Makes the gradients of a window those of the mean over all its items, on all ranks.

    Each rank adds up the gradients of its summed losses and counts its items. Only when the window closes are the
    items of all ranks known: then the gradients, which the engine has averaged over ranks, are multiplied by
    `ranks / items`. To keep them in range until then, losses are multiplied by `factor`, a power of two (which costs
    no accuracy) near the previous window's value. A further loss after the window has closed, before the optimizer
    steps, is taken up in the same way.

    With several optimizers each has a window of its own. Whose parameters a loss has reached shows in the gradients.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.reset()

    def reset(self) -> None:
        self.windows: list[ItemWindow] = []
        self.factor: float = 1.0
        self.used: bool = False
        self._next_factor = 1.0
        self._before: list[list[Any]] = []

    def begin(self, index: int) -> None:
        """A new window: called when the optimizer of that number has stepped, or cleared its gradients."""
        if self.used:
            for window in (*self.windows[:1], *self.windows[index + 1 : index + 2]):
                window.begin()

    def refuse_others(self) -> None:
        """A loss without a count would be multiplied together with those that have one."""
        if any(window.scale is not None and not window.closed for window in self.windows[:1]):
            raise ValueError(
                "`backward` was called both with and without `num_items` in one accumulation window: give "
                "`num_items` for every loss, or for none."
            )

    def open(self, groups: list[list[torch.Tensor]]) -> float:
        """Before the backward of a summed loss; returns what to multiply it with. groups: a window's parameters."""
        self.used = True
        while len(self.windows) < len(groups):
            self.windows.append(ItemWindow())
        for window, group in zip(self.windows, groups, strict=False):
            # Cleared by other hands: a script may update its parameters itself.
            if window.scale is not None and not self._strategy.has_gradients(group):
                window.begin()
        if all(window.scale is None for window in self.windows):
            self.factor = self._next_factor
        for window, group in zip(self.windows, groups, strict=False):
            if window.closed:
                window.rescale(self._strategy, group, self.factor)
        marks = self._strategy.gradient_marks  # which change with every gradient
        self._before = list(map(marks, groups)) if len(groups) > 1 else []
        return self.factor

    def add(self, num_items: float, groups: list[list[torch.Tensor]], *, last: bool) -> None:
        """After that backward: count the items where it has left gradients. last: whether those windows close."""
        for index, group in enumerate(groups):
            if not self._before or self._strategy.gradient_marks(group) != self._before[index]:
                window = self.windows[index]
                window.items += num_items
                window.scale = self.factor
                window.closed = last
        self._before = []

    def close(self, groups: list[list[torch.Tensor]]) -> None:
        """Exchange the counts and bring the gradients to the mean over all items."""
        communicator = current()
        windows = self.windows[: len(groups)]
        values = [value for window in windows for value in (window.items, float(window.closed))]
        if communicator.size > 1:
            values = communicator.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        for window, group, items, closes in zip(windows, groups, values[::2], values[1::2], strict=True):
            if not closes:
                continue
            if items == 0:
                raise ValueError(
                    "num_items is 0 on all ranks for a whole window: there is nothing to take the mean over."
                )
            self._strategy.complete_gradients(group)
            wanted = self._strategy.averaged_ranks() / items
            if window.scale is None:  # its items are all on other ranks
                window.scale = self.factor
            window.rescale(self._strategy, group, wanted)
            self._next_factor = 2.0 ** round(math.log2(wanted))


def item_count(num_items: Any) -> float:
    """A number of items as given by a script, checked."""
    try:
        count = float(num_items)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not math.isfinite(count) or count < 0:
        raise ValueError(
            f"num_items is {num_items} on rank {current().rank}: give the number of items that the loss is a sum over."
        )
    return count
