"""Model, optimizer and scheduler of Megatron-LM in one: a forward is a whole step."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.engines.megatron.board import Board
from accelerate.engines.megatron.weights import unwrapped

logger = logging.getLogger(__name__)

# Where the length of a batch's sequences is read.
_TOKENS = ("input_ids", "tokens")
_KEYWORDS = (
    "A model of Megatron-LM takes a batch as keyword arguments, `model(**batch)`, with at least one tensor "
    "that has a row for each sample."
)


class MegatronEngine(nn.Module):
    """What a script gets for its model. In training, `engine(**batch)` cuts the batch into micro-batches, sends them
    through the pipeline forward and back, steps optimizer and scheduler, and returns the loss; in evaluation it goes
    forward alone. Every process of a copy of the model gets the same outputs.

    Args:
        accelerator: the Accelerator, whose plugin says what is trained and how.
        model: this process's parts of the model, as Megatron-LM wraps them.
        optimizer: of Megatron-LM; None for evaluation alone.
        scheduler: of Megatron-LM, or None.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        # Here and not above: the class has its name also where megatron-core is not installed.
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from accelerate.engines.megatron.arguments import arguments
        from accelerate.engines.megatron.parallel import from_last_stage

        self.module: Any = nn.ModuleList(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._accelerator = weakref.ref(accelerator)
        self.plugin = accelerator.state.megatron_lm_plugin
        self.args = arguments(self.plugin)
        self.device = accelerator.device
        # That of transformers which the model was built from, if any.
        self.model_config = self.plugin.model_config
        self.train_step_handler = _train_step(accelerator, self.plugin, self.args)
        self.iteration = 0
        self.consumed_train_samples = 0
        # Of the last step: the norm of its gradients before they were clipped.
        self.grad_norm: float | None = None
        self.eval_total_loss_dict: dict[str, tuple[Any, int]] = {}
        logs = self.args.tensorboard_dir is not None and accelerator.is_main_process
        self._board = Board(self.args) if logs else None
        self.module_config = self.get_module_config()
        self._schedule = get_forward_backward_func()
        self._from_last_stage = from_last_stage
        # How long sequences may be, where each position has a weight of its own. All stages know it, so that none of
        # them waits for one that has found out alone.
        first: Any = self.chunks[0]
        learned = getattr(first, "position_embedding_type", None) == "learned_absolute"
        self._longest: int | None = first.max_sequence_length if learned else None

    @property
    def base_model(self) -> nn.Module:
        """The first of this process's parts."""
        first: nn.Module = self.module[0]
        return first

    @property
    def chunks(self) -> list[nn.Module]:
        """This process's parts of the model, from under the wrappers."""
        return [unwrapped(model) for model in self.module]

    def get_module_config(self) -> Any:
        """The config of the model, with what the schedule needs to know of optimizer and gradients."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        config = get_model_config(self.module[0])
        config.finalize_model_grads_func = finalize_model_grads
        if self.optimizer is not None:
            config.grad_scale_func = self.optimizer.scale_loss
        if self.module[0].ddp_config.overlap_grad_reduce:
            waits = [model.no_sync for model in self.module]
            config.no_sync_func = waits[0] if len(waits) == 1 else waits
        return config

    def train(self, mode: bool = True) -> MegatronEngine:
        """Train in the forwards that follow."""
        if mode:
            self.log_eval_results()
        super().train(mode)
        return self

    def eval(self) -> MegatronEngine:
        """Evaluate in the forwards that follow."""
        return self.train(False)

    # --- batches ------------------------------------------------------------------------------------------------

    def _micro_batches(self, rows: int) -> tuple[int, int]:
        """Into how many micro-batches of which size a batch is cut. All have the same size, as stages expect."""
        asked = min(self.args.num_micro_batches, rows)
        count = next(count for count in range(asked, rows + 1) if rows % count == 0)
        if len(self.module) > 1 and count % self.args.pipeline_model_parallel_size != 0:
            raise ValueError(
                f"{count} micro-batches cannot be divided evenly over the {self.args.pipeline_model_parallel_size} "
                "interleaved stages: make `num_micro_batches` a multiple of them, and pass drop_last=True to the "
                "loader."
            )
        return count, rows // count

    def get_batch_data_iterator(self, batch_data: dict[str, Any]) -> Any:
        """The micro-batches of a batch: an iterator, or one for each part of the model where this process has several.

        None without a batch.
        """
        if not batch_data:
            return None if len(self.module) == 1 else [None] * len(self.module)
        rows = _rows(batch_data)
        count, size = self._micro_batches(rows)
        parts = [
            {name: _cut(name, value, number * size, size, rows) for name, value in batch_data.items()}
            for number in range(count)
        ]
        iterators = [iter(parts) for _ in self.module]
        return iterators[0] if len(iterators) == 1 else iterators

    # --- steps --------------------------------------------------------------------------------------------------

    def train_step(self, **batch_data: Any) -> tuple[dict[str, torch.Tensor], int, float | None, int | None]:
        """A step of training: returns losses by name, whether the step was left out, the norm of the gradients, and
        how many of them are zero where that is counted."""
        if self.optimizer is None:
            raise RuntimeError(
                "This model was prepared without an optimizer, so it cannot be trained: pass both to one call of "
                "`prepare`, or call `model.eval()`."
            )
        for model in self.module:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(batch_data, forward_only=False)
        stepped, self.grad_norm, zeros = self.optimizer.step()
        self.optimizer.skipped_iter = not stepped
        if stepped and self.scheduler is not None:
            self.scheduler.step(increment=self.args.global_batch_size)
        self.iteration += 1
        self.consumed_train_samples += _rows(batch_data) * self.args.data_parallel_size
        if self._board is not None:
            self._board.step(self, losses, zeros)
        return losses, int(not stepped), self.grad_norm, zeros

    def eval_step(self, **batch_data: Any) -> dict[str, torch.Tensor]:
        """A step of evaluation: losses by name, and logits where the train step returns them."""
        with torch.no_grad():
            return self._run(batch_data, forward_only=True)

    def _run(self, batch: dict[str, Any], *, forward_only: bool) -> dict[str, torch.Tensor]:
        count, size = self._micro_batches(_rows(batch))
        found = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=self.get_batch_data_iterator(batch),
            model=list(self.module),
            num_microbatches=count,
            seq_length=self._length(batch),
            micro_batch_size=size,
            decoder_seq_length=self.args.decoder_seq_length,
            forward_only=forward_only,
        )
        return self._from_last_stage(_joined(found), self.device)

    def _length(self, batch: dict[str, Any]) -> int:
        """How long the sequences are, which a stage is told before it gets any."""
        tokens = next((batch[name] for name in _TOKENS if name in batch), None)
        if tokens is not None and tokens.ndim < 2:
            raise ValueError(
                f"The tokens of this batch have the shape {list(tokens.shape)}, but a batch needs a row of them for "
                "each sample: give the loader a `batch_size`."
            )
        found = self.args.seq_length if tokens is None else tokens.shape[1]
        if self._longest is not None and found is not None and found > self._longest:
            raise ValueError(
                f"The sequences of this batch have {found} tokens, but the model has only {self._longest} "
                "positions: truncate them, or train a model with more."
            )
        if found is None and self.args.pipeline_model_parallel_size > 1:
            raise ValueError(
                "The stages of a pipeline need to know how long sequences are, but this batch has none of "
                f"{', '.join(_TOKENS)}: set `seq_length` of the MegatronLMPlugin."
            )
        return int(found or 1)

    def _forward_step(self, data_iterator: Iterator[Any], model: nn.Module, *args: Any) -> tuple[Any, Any]:
        output, loss_function = self.train_step_handler.forward_step(data_iterator, model, *args)
        return output, functools.partial(_counted, loss_function)

    def forward(self, *args: Any, **batch_data: Any) -> Any:
        """A step of training, or of evaluation: after `eval()`, and without gradients.

        Args:
            *args: refused: micro-batches are told apart by their names.
            **batch_data: the batch. What has a row for each sample is cut into micro-batches, and anything else is the
                same for all of them.
        """
        if args:
            raise TypeError(_KEYWORDS)
        batch_data = {name: value for name, value in batch_data.items() if value is not None}
        if self.training and torch.is_grad_enabled():
            losses = self.train_step(**batch_data)[0]
        else:
            losses = self.eval_step(**batch_data)
            self._note(losses)
        single = [value for value in losses.values() if value.ndim == 0]
        loss = torch.stack([value.to(self.device).float() for value in single]).sum()
        kind = getattr(self.train_step_handler, "model_output_class", None)
        return loss if kind is None else kind(loss=loss, logits=losses.get("logits"))

    def megatron_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens that the model writes after those it is given; see `generation.megatron_generate`."""
        from accelerate.engines.megatron.generation import megatron_generate

        return megatron_generate(self, *args, **kwargs)

    # --- what evaluation has found ------------------------------------------------------------------------------

    def _note(self, losses: dict[str, torch.Tensor]) -> None:
        for name, value in losses.items():
            if value.ndim == 0:
                total, count = self.eval_total_loss_dict.get(name, (0.0, 0))
                self.eval_total_loss_dict[name] = (total + value.detach(), count + 1)

    def log_eval_results(self) -> None:
        """Log the means of what evaluation has found since the last call."""
        means = {name: float(total) / count for name, (total, count) in self.eval_total_loss_dict.items()}
        for name, mean in means.items():
            logger.info("iteration %d: %s of the evaluation is %.6f", self.iteration, name, mean)
        if self._board is not None and means:
            self._board.evaluation(means, self.iteration)
        self.eval_total_loss_dict = {}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, output_dir: Any) -> None:
        """The same as `accelerator.save_state`: Megatron-LM's checkpoint, with the rest of the training beside it."""
        self._needed_accelerator().save_state(output_dir)

    def load_checkpoint(self, input_dir: Any) -> None:
        """The same as `accelerator.load_state`."""
        self._needed_accelerator().load_state(input_dir)

    def _needed_accelerator(self) -> Any:
        accelerator = self._accelerator()
        if accelerator is None:
            raise RuntimeError(
                "The Accelerator of this model no longer exists, but saving and loading need it: keep a reference "
                "to it."
            )
        return accelerator


def _train_step(accelerator: Any, plugin: Any, args: Any) -> Any:
    if plugin.custom_train_step_class is not None:
        return plugin.custom_train_step_class(args, **(plugin.custom_train_step_kwargs or {}))
    from accelerate.engines.megatron.train_steps import train_step_for

    return train_step_for(accelerator, args)


def _rows(batch: dict[str, Any]) -> int:
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return int(value.shape[0])
    raise ValueError(_KEYWORDS)


def _cut(name: str, value: Any, start: int, size: int, rows: int) -> Any:
    """What a micro-batch gets of one value of a batch."""
    if not hasattr(value, "__len__") or (isinstance(value, torch.Tensor) and value.ndim == 0) or len(value) == 1:
        return value  # of the batch as a whole
    if len(value) != rows:
        raise ValueError(
            f"`{name}` has {len(value)} rows, but the batch has {rows} samples: give it one for each, so that it "
            "can be split into micro-batches."
        )
    return value[start : start + size]


def _counted(loss_function: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of losses, of how many, and what is reported: a mean counts once, so that all ways of dividing agree."""
    found = loss_function(output)
    if len(found) == 3:
        return found
    loss, reported = found
    return loss, torch.ones((), dtype=torch.int, device=loss.device), reported


def _joined(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The outputs of all micro-batches: means of values, samples one after the other."""
    if not found:
        return {}
    return {
        name: torch.stack([each[name] for each in found]).float().mean()
        if value.ndim == 0
        else torch.cat([each[name] for each in found])
        for name, value in found[0].items()
    }
