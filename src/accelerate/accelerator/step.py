"""Stepping: backward, accumulation, clipping and precision, once per batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from accelerate.accelerator.base import AcceleratorBase
from accelerate.accumulation import Accumulating, item_count
from accelerate.available import is_lomo_available
from accelerate.config.handlers import AutocastKwargs
from accelerate.errors import a_kind_of, warn
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.strategies import sync_in_backward
from accelerate.torch_internals.grad_scaler import has_scaled, unscale_once


class Stepping(AcceleratorBase):
    def backward(
        self, loss: torch.Tensor, *, num_items: int | float | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Compute gradients: `loss.backward()`, with the loss divided by the accumulation steps and scaled for fp16.

        Args:
            loss: the loss of this micro-batch.
            num_items: the number of items (tokens, samples) that `loss` is a sum over. Gradients then become those of
                the mean over all items of the accumulation window on all ranks, however they are distributed.
            kwargs: arguments for `Tensor.backward`; `learning_rate` calls `lomo_backward` instead.
        """
        state = self.gradient_state
        try:
            if kwargs and "learning_rate" in kwargs:
                self.lomo_backward(loss, kwargs["learning_rate"])
            elif num_items is not None:
                self._backward_of_sum(loss, item_count(num_items), kwargs)
            else:
                if self._items.used:
                    self._items.refuse_others()
                steps = state.num_steps
                scaled_loss = loss if steps == 1 or self._strategy.divides_loss else loss / steps
                if self.scaler is not None:
                    scaled_loss = self._scaled(scaled_loss, self.scaler)
                if self._stops_at_nonfinite is not None:
                    self._stops_at_nonfinite.note_loss(loss)
                self._strategy.backward(scaled_loss, **kwargs)
        except (AttributeError, TypeError, ValueError):
            # Asked only now, so that a good loss is not asked for what it is.
            if hasattr(loss, "backward"):
                raise
            raise TypeError(
                f"`backward` needs the loss as a tensor, but was given {a_kind_of(loss)}: pass what the loss "
                "function returned, without `.item()`."
            ) from None
        state.backwards += 1

    def _scaled(self, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> torch.Tensor:
        """The loss as fp16 needs it. Warns once if no optimizer was prepared that would unscale the gradients."""
        if not self._optimizers and scaler.is_enabled() and not has_scaled(scaler):  # until the first loss: said once
            warn(
                f"fp16 scales gradients by {scaler.get_scale():g}, but no optimizer was prepared that would unscale "
                "them before its step: pass it to `accelerator.prepare()`."
            )
        scaled: torch.Tensor = scaler.scale(loss)
        return scaled

    def _backward_of_sum(self, loss: torch.Tensor, num_items: float, kwargs: dict[str, Any]) -> None:
        uneven = getattr(self.gradient_state.active_dataloader, "on_uneven_end", None)
        if uneven is not None:
            uneven.refuse_empty_ranks(self.gradient_state.active_dataloader)
        if self._stops_at_nonfinite is not None:
            self._stops_at_nonfinite.note_loss(loss)
        groups = self._window_parameters()
        loss = loss * self._items.open(groups)
        if self.scaler is not None:
            loss = self._scaled(loss, self.scaler)
        self._strategy.backward(loss, divide=False, **kwargs)
        last = self.gradient_state.sync_gradients
        self._items.add(num_items, groups, last=last)
        if last:
            self._items.close(groups)

    def _window_parameters(self) -> list[list[torch.Tensor]]:
        """All parameters; with several optimizers those of each, after those of none."""
        counts = (len(self._models), *(len(optimizer.param_groups) for optimizer in self._optimizers))
        if self._item_groups is None or self._item_groups[0] != counts:
            self._item_groups = (counts, self._group_parameters())
        return self._item_groups[1]

    def _group_parameters(self) -> list[list[torch.Tensor]]:
        listed = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self._optimizers]
        every = {id(p): p for model in self._models for p in model.parameters()}
        if len(listed) <= 1:
            return [list((every | {id(p): p for group in listed for p in group}).values())]
        owned = {id(p) for group in listed for p in group}
        return [[p for name, p in every.items() if name not in owned], *listed]

    def _close_window(self) -> None:
        """For a process that has run out of batches: its part in the exchange of the others' counts."""
        if self._items.used:
            self._items.close(self._window_parameters())

    def accumulate(self, *models: Any) -> Accumulating:
        """Wrap one micro-batch: gradients are synchronized, and the optimizer steps, only at the end of a window.

        Args:
            models: the models trained in the block. Each set of models has its own window.

        Returns:
            The context manager.

        Example:
            ```python
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        return Accumulating(self._accumulation, models)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Do not synchronize the gradients of the backwards inside the block.

        Args:
            model: the prepared model.
        """
        with self._strategy.micro_batch(model, sync=False) or nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """Synchronize gradients in the next backward, although the forward ran under `no_sync`.

        Args:
            model: the prepared model.
        """
        with sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train on loaders of different lengths: a rank without batches answers the collectives of the others.

        Args:
            joinables: the prepared models, and other `torch.distributed.algorithms.Joinable` objects.
            even_batches: overrides `even_batches` of all prepared loaders inside the block.
        """
        if self._strategy.needs_even_batches:
            warn(
                "No process can leave a sharded model while others continue, so `join_uneven_inputs` does nothing "
                "here: prepare loaders with even_batches=True."
            )
        if self.num_processes == 1 or self._strategy.needs_even_batches:
            yield
            return
        if self._stops_at_nonfinite is not None:
            raise ValueError(
                'Inside `join_uneven_inputs`, some processes take fewer steps, but nonfinite="stop" needs all of '
                'them at each: pass nonfinite="skip" to the Accelerator, or leave it out.'
            )
        from accelerate.data_loader import BatchSamplerShard

        shards = [] if even_batches is None else [loader.batch_sampler for loader in self._dataloaders]
        changed = [shard for shard in shards if isinstance(shard, BatchSamplerShard)]
        if len(changed) < len(shards):
            warn(
                f"`even_batches` has no effect on loaders of iterable datasets: {len(shards) - len(changed)} of the "
                f"{len(shards)} prepared loaders have one."
            )
        before = [shard.even_batches for shard in changed]
        for shard in changed:
            shard.even_batches = bool(even_batches)
        self._joining = True
        try:
            with Join(joinables, enable=True, throw_on_early_termination=False):
                yield
        finally:
            self._joining = False
            for shard, value in zip(changed, before, strict=True):
                shard.even_batches = value

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in mixed precision inside the block. Prepared models do so by themselves.

        Args:
            autocast_handler: settings of `torch.autocast`. By default those among the `kwargs_handlers`.
        """
        casting = self._precision.autocast(autocast_handler or self.autocast_handler)
        with casting if self.native_amp else nullcontext():
            yield

    @contextlib.contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Shard sequences over the context-parallel ranks, if there are any. Put it around forward and backward.

        Args:
            buffers: the tensors with a sequence dimension: inputs, labels, positions.
            buffer_seq_dims: the sequence dimension of each of them.
            no_restore_buffers: those that need not be restored when the block ends.
        """
        config = self.parallelism_config
        if config is None or not config.cp_enabled:
            yield
            return
        from accelerate.parallel.context import sharded_sequences

        with sharded_sequences(config, self.torch_device_mesh, buffers, buffer_seq_dims, no_restore_buffers):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scaling of fp16 on gradients.

        Args:
            optimizer: one optimizer or a list of them. By default all.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        for each in optimizers:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            if any(p.grad is not None for group in each.param_groups for p in group["params"]):
                unscale_once(self.scaler, each)

    def _to_clip(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters as a list, with gradients that are not scaled; those of other optimizers are left alone."""
        if not (self.gradient_state.sync_gradients or self._clips_early):
            self._say_clips_early()
        listed = _listed(parameters)
        if self.scaler is not None:
            clipped = {id(parameter) for parameter in listed}
            self.unscale_gradients(
                [
                    optimizer
                    for optimizer in self._optimizers
                    if any(id(p) in clipped for group in optimizer.param_groups for p in group["params"])
                ]
            )
        return listed

    def _say_clips_early(self) -> None:
        self._clips_early = True
        if self.is_main_process and not self._strategy.owns_accumulation:
            warn(
                "Gradients are clipped in the middle of an accumulation window, where they are not complete: clip them "
                "`if accelerator.sync_gradients:`."
            )

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip the total norm of gradients.

        Call it when `accelerator.sync_gradients` is true: before that, gradients are incomplete.

        Args:
            parameters: the parameters whose gradients are clipped.
            max_norm: the largest total norm that is allowed.
            norm_type: the type of the norm, such as 2 or `float("inf")`.

        Returns:
            The total norm before clipping, where the strategy knows it.
        """
        return self._strategy.clip_grad_norm_(self._to_clip(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to between `-clip_value` and `clip_value`.

        Args:
            parameters: the parameters whose gradients are clipped.
            clip_value: the largest absolute value that is allowed.
        """
        self._strategy.clip_grad_value_(self._to_clip(parameters), clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because of gradients that are not finite.

        That happens with fp16, and with `nonfinite="skip"`.
        """
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward of a LOMO optimizer, which updates the parameters on the way.

        Args:
            loss: the loss.
            learning_rate: the learning rate of this step.
        """
        if learning_rate is None:
            raise ValueError("lomo_backward updates the parameters itself: pass the learning rate.")
        found: list[Any] = []
        if is_lomo_available():
            from lomo_optim import AdaLomo, Lomo

            found = [item.optimizer for item in self._optimizers if isinstance(item.optimizer, (Lomo, AdaLomo))]
        if not found:
            raise ValueError(
                "lomo_backward needs a LOMO optimizer, and none is prepared: prepare one of those that "
                "`pip install lomo-optim` brings."
            )
        for optimizer in found:
            optimizer.fused_backward(loss, learning_rate)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, torch.nn.Module) or not hasattr(parameters, "__iter__"):
        raise TypeError(f"Clipping takes parameters, but was given {a_kind_of(parameters)}: pass `model.parameters()`.")
    listed = list(parameters)
    if not listed and isinstance(parameters, Iterator):
        warn(
            "Nothing is clipped: these parameters are an iterator that has come to its end; call `model.parameters()` "
            "for each clipping."
        )
    return listed
