"""Training when some processes have one batch less (`even_batches=False`).

The processes that still have a batch wait, in their backward, for gradients from all. A process that has run out
stands in with a forward and backward that add nothing, once for each step it misses. It has not stepped its optimizer
in the same way as the others (who may clip, for one), so rank 0, which always has the most batches, then gives
everyone the state it has come to.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from accelerate.comm import current
from accelerate.comm.ops import broadcast_data

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class UnevenEnd:
    """Called by a loader when an iteration has come to its end on this process."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator: weakref.ref[Accelerator] = weakref.ref(accelerator)

    def __call__(self, loader: Any, backwards_before: int) -> None:
        accelerator = self._accelerator()
        shard = loader._shard
        if accelerator is None or accelerator._joining or not getattr(shard, "uneven", False):
            return
        models = [m for m in accelerator._models if m.training and accelerator._strategy.joinable(m)]
        trained = accelerator.gradient_state.backwards > backwards_before
        # A process without a single batch has only its models to tell it whether the others are training.
        without_batches = shard.missed_steps > 0 and len(shard) == 0
        if not models or not (trained or (without_batches and torch.is_grad_enabled())):
            return
        if shard.missed_steps:
            loader.ends_everywhere = True
            self._stand_in(accelerator, models)
        if accelerator.sync_gradients:
            self._follow_rank_0(accelerator, models)

    @staticmethod
    def _stand_in(accelerator: Accelerator, models: list[torch.nn.Module]) -> None:
        with accelerator.accumulate(*models):
            losses = [accelerator._strategy.stand_in(model) for model in models]
            torch.stack([loss for loss in losses if loss is not None]).sum().backward()
        if accelerator.sync_gradients:
            accelerator._close_window()

    @staticmethod
    def _follow_rank_0(accelerator: Accelerator, models: list[torch.nn.Module]) -> None:
        communicator = current()
        with torch.no_grad():
            for model in models:
                for tensor in [*model.parameters(), *model.buffers()]:
                    communicator.broadcast(tensor.data)
        parts: list[Any] = [*accelerator._optimizers, *accelerator._schedulers]
        if accelerator.scaler is not None:
            parts.append(accelerator.scaler)
        for part in parts:
            state = broadcast_data(part.state_dict())
            if communicator.rank != 0:
                part.load_state_dict(state)
        for optimizer in accelerator._optimizers:
            optimizer.zero_grad()
