"""Training when some processes have one batch less (`even_batches=False`).

The processes that still have a batch wait, in their forwards and backwards, for all others. A process that has run out
stands in once for each step it misses: it replays the forwards and backwards of its own last batch, in their order,
with models that add nothing. It has not stepped its optimizer in the same way as the others (who may clip, for one),
so rank 0, which always has the most batches, then gives everyone the state it has come to.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accelerate.comm import current
from accelerate.comm.ops import broadcast_data
from accelerate.data_loader import BatchSamplerShard

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class Forward(NamedTuple):
    """One call of a prepared model. backwards: how many backwards there had been before it."""

    model: torch.nn.Module
    backwards: int
    with_gradients: bool


class UnevenEnd:
    """Follows the batches of one loader, and is called when an iteration has come to its end on this process."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator: weakref.ref[Accelerator] = weakref.ref(accelerator)
        self._forwards: list[Forward] = []
        self._backwards = 0

    def next_batch(self, backwards: int) -> None:
        """A batch is handed out."""
        self._forwards = []
        self._backwards = backwards

    def note(self, forward: Forward) -> None:
        self._forwards.append(forward)

    @staticmethod
    def refuse_empty_ranks(loader: Any) -> None:
        """A process that never gets a batch cannot know that the others exchange the numbers of their items."""
        shard = loader._shard
        if (
            isinstance(shard, BatchSamplerShard)
            and not shard.split_batches
            and shard.total_length < shard.num_processes
        ):
            raise ValueError(
                f"`num_items` needs a batch for every process, but this loader has {shard.total_length} for "
                f"{shard.num_processes}: use even_batches=True, a smaller batch size, or fewer processes."
            )

    def __call__(self, loader: Any, backwards_before: int) -> None:
        accelerator, shard = self._accelerator(), loader._shard
        if accelerator is None or accelerator._joining or not getattr(shard, "uneven", False):
            return
        trained = accelerator.gradient_state.backwards > backwards_before
        models = [m for m in accelerator._models if m.training and accelerator._strategy.joinable(m)]
        if shard.missed_steps and len(shard) == 0 and models and torch.is_grad_enabled():
            # Without a single batch there are only the models to tell whether, and what, the others are training.
            trained = True
            self._forwards = [Forward(model, self._backwards - 1, True) for model in models]
        if shard.missed_steps:
            loader.ends_everywhere = True
            self._stand_in(accelerator)
        if trained and models and accelerator.sync_gradients:
            _follow_rank_0(accelerator, models)
        self._forwards = []

    def broken_off(self, loader: Any) -> None:
        """The loop has left this loader. Where that was after its last step, others may be waiting to follow."""
        accelerator, shard = self._accelerator(), loader._shard
        last = loader.end_of_dataloader and not getattr(shard, "missed_steps", 0)
        if last and accelerator is not None and accelerator.gradient_state.backwards > self._backwards:
            self(loader, self._backwards)

    def _stand_in(self, accelerator: Accelerator) -> None:
        # A list of its own: the replayed forwards are noted as well.
        forwards, total = list(self._forwards), accelerator.gradient_state.backwards
        models = list(dict.fromkeys(forward.model for forward in forwards))
        with accelerator.accumulate(*models):
            for backwards, group in itertools.groupby(forwards, key=lambda forward: forward.backwards):
                losses = [_forward(accelerator, forward) for forward in group]
                with_gradients = [loss for loss in losses if loss is not None and loss.requires_grad]
                if backwards < total and with_gradients:
                    torch.stack(with_gradients).sum().backward()
                    if accelerator.sync_gradients:
                        accelerator._close_window()


def watch_forwards(accelerator: Any, model: torch.nn.Module) -> None:
    """Let the loader that a batch came from know of each forward of a prepared model."""
    state, watched = accelerator.gradient_state, weakref.ref(model)

    def note(module: torch.nn.Module, args: Any) -> None:
        end = getattr(state.active_dataloader, "on_uneven_end", None)
        if end is not None:
            end.note(Forward(watched(), state.backwards, torch.is_grad_enabled()))  # type: ignore[arg-type]

    model.register_forward_pre_hook(note)


def _forward(accelerator: Accelerator, forward: Forward) -> torch.Tensor | None:
    with torch.set_grad_enabled(forward.with_gradients):
        return accelerator._strategy.stand_in(forward.model)


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
