"""How far a run was inside an accumulation window: counts, and the gradients so far."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.accumulation import Accumulation, ItemWindow, ItemWindows
from accelerate.checkpoint.gradients import packed
from accelerate.checkpoint.run_state import named_parameters


def pending(accumulation: Accumulation, optimizers: list[Any]) -> bool:
    """Whether there are gradients that wait for a step: inside a window, or in a script that counts by itself."""
    state = accumulation.state
    return not state.sync_gradients or any(
        optimizer._backwards_seen != state.backwards and optimizer._has_gradients() for optimizer in optimizers
    )


def capture(
    models: list[torch.nn.Module], accumulation: Accumulation, items: ItemWindows, inside: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """The counts of the windows, and in the middle of one (inside) the gradients by parameter."""
    numbers = {id(model): number for number, model in enumerate(models)}
    counts = [
        ([numbers[one] for one in key], count)
        for key, count in accumulation.counts.items()
        if all(one in numbers for one in key)
    ]
    progress = {
        "step": accumulation.step,
        "counts": counts,
        "sync_gradients": accumulation.state.sync_gradients,
        "gradients": inside,
        "windows": [(window.items, window.scale, window.closed) for window in items.windows],
        "factors": (items.factor, items._next_factor, items.used),
    }
    if not inside:
        return progress, None
    return progress, packed(
        {
            name: parameter.grad.detach()
            for name, parameter in named_parameters(models).items()
            if parameter.grad is not None
        }
    )


def restore(
    progress: dict[str, Any] | None,
    models: list[torch.nn.Module],
    optimizers: list[Any],
    accumulation: Accumulation,
    items: ItemWindows,
) -> None:
    """Go on inside the window, or start a new one where nothing is known of it."""
    items.reset()
    accumulation.reset()
    waits = progress is not None and progress["gradients"]
    for optimizer in optimizers:
        optimizer._backwards_seen = -1 if waits else accumulation.state.backwards
    if progress is None:
        return
    for numbers, count in progress["counts"]:
        if max(numbers, default=0) < len(models):
            accumulation.counts[tuple(id(models[number]) for number in numbers)] = count
    accumulation.state._set_sync_gradients(progress["sync_gradients"])
    items.factor, items._next_factor, items.used = progress["factors"]
    for values in progress["windows"]:
        window = ItemWindow()
        window.items, window.scale, window.closed = values
        items.windows.append(window)
