"""The train step of decoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from accelerate.engines.megatron.train_steps.base import (
    AbstractTrainStep,
    ForwardStep,
    GetBatch,
    Loss,
    broadcast,
    output_class,
    per_token,
    plugin_of,
    taken,
)


class GPTTrainStep(AbstractTrainStep):
    """The step of a decoder: GPT-2, Llama.

    Labels are those of transformers: the same positions as `input_ids`, which are shifted here, and -100 where nothing
    is to be learned. Without labels, the tokens are their own.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.eod_token: int | None = args.eos_token_id
        self.reset_position_ids: bool = args.reset_position_ids
        self.reset_attention_mask: bool = args.reset_attention_mask
        self.eod_mask_loss: bool = args.eod_mask_loss
        self.return_logits: bool = args.return_logits
        self.vocab_size: int | None = getattr(args, "orig_vocab_size", None)
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = output_class("CausalLMOutputWithCrossAttentions", args)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        """The function that gives tokens, labels, loss mask, attention mask and position ids."""
        return plugin_of(accelerator).custom_get_batch_function or (
            self._batch_of_megatron if megatron_dataset_flag else self._batch_of_transformers
        )

    def _batch_of_megatron(self, data_iterator: Any) -> tuple[torch.Tensor | None, ...]:
        text = broadcast(data_iterator, ["text"])["text"]
        tokens = text[:, :-1].contiguous()
        return tokens, text[:, 1:].contiguous(), *self._masks(tokens, torch.ones_like(tokens, dtype=torch.float), None)

    def _batch_of_transformers(self, data_iterator: Any) -> tuple[torch.Tensor | None, ...]:
        batch = taken(data_iterator, "input_ids")
        tokens, padding = batch["input_ids"].long(), batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = tokens if padding is None else tokens.masked_fill(padding == 0, -100)
        # The label of a token is the one after it; the last token has none.
        labels = functional.pad(labels[:, 1:].long(), (0, 1), value=-100)
        loss_mask, mask, positions = self._masks(tokens, (labels != -100).float(), padding)
        if "position_ids" in batch:
            positions = batch["position_ids"].long()
        return tokens, labels.clamp_min(0), loss_mask, mask, positions

    def _masks(
        self, tokens: torch.Tensor, loss_mask: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Loss mask, attention mask (None is causal; True may not be looked at) and positions."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        ends = torch.eq(tokens, self._end_of_documents())
        if self.eod_mask_loss:
            loss_mask = loss_mask.masked_fill(ends, 0.0)
        begins = functional.pad(ends[:, :-1], (1, 0))
        mask = None
        if self.reset_attention_mask or padding is not None:
            later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
            mask = later.expand(len(tokens), 1, length, length)
            if padding is not None:
                mask = mask | (padding == 0)[:, None, None, :]
                loss_mask = loss_mask * padding  # Padding in front of a text does not foretell how it begins.
            if self.reset_attention_mask:
                document = begins.cumsum(1)
                mask = mask | (document[:, None, :, None] != document[:, None, None, :])
        if self.reset_position_ids:
            positions = positions - (positions * begins).cummax(1).values
        return loss_mask, mask, positions

    def _end_of_documents(self) -> int:
        if self.eod_token is not None:
            return self.eod_token
        if self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss:
            raise ValueError("The ends of documents are not known: give `other_megatron_args={'eos_token_id': ...}`.")
        return -1  # which no token is

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """The function of a loss mask and the model's output, which are losses (and with `return_logits` logits)."""

        def loss_func(loss_mask: torch.Tensor, output: Any) -> Loss:
            losses, logits = output if self.return_logits else (output, None)
            total, count, reported = per_token(losses, loss_mask)
            return total, count, reported if logits is None else {**reported, "logits": logits}

        return plugin_of(accelerator).custom_loss_function or loss_func

    def get_forward_step_func(self) -> ForwardStep:
        """The function of an iterator and a model that gives an output, and the function of its loss."""

        def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            if self.return_logits:
                logits = model(tokens, position_ids, attention_mask)
                return logits, partial(self._loss_of_logits, model, labels, loss_mask)
            return model(tokens, position_ids, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step

    def _loss_of_logits(
        self, model: torch.nn.Module, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor
    ) -> Any:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        from accelerate.engines.megatron.weights import unwrapped

        # A copy: megatron-core computes losses in the memory of the logits.
        whole = gather_from_tensor_model_parallel_region(logits.detach())[..., : self.vocab_size].clone()
        bare: Any = unwrapped(model)
        losses = bare.compute_language_model_loss(labels, logits.transpose(0, 1).contiguous())
        return self.loss_func(loss_mask, (losses, whole))
