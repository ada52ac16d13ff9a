"""The train step of BERT."""

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
    reported_mean,
    taken,
)


class BertTrainStep(AbstractTrainStep):
    """The step of a BERT: masked words (and the order of sentences), or classes of sequences."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        self.model_output_class = output_class("SequenceClassifierOutput", args)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        """The function that gives tokens, types, order of sentences, loss mask, labels and padding mask."""

        def of_megatron(data_iterator: Any) -> tuple[torch.Tensor, ...]:
            keys = ["text", "types", "is_random", "loss_mask", "labels", "padding_mask"]
            batch = broadcast(data_iterator, keys)
            return tuple(batch[key].float() if key == "loss_mask" else batch[key] for key in keys)

        def of_transformers(data_iterator: Any) -> tuple[torch.Tensor | None, ...]:
            batch = taken(data_iterator, "input_ids")
            tokens, labels = batch["input_ids"].long(), batch.get("labels")
            types = batch.get("token_type_ids")
            types = torch.zeros_like(tokens) if types is None else types.long()
            padding = batch.get("attention_mask")
            padding = torch.ones_like(tokens) if padding is None else padding.long()
            loss_mask = None if labels is None else (labels != -100).float()
            return tokens, types, batch.get("next_sentence_label"), loss_mask, labels, padding

        return plugin_of(accelerator).custom_get_batch_function or (
            of_megatron if megatron_dataset_flag else of_transformers
        )

    def get_loss_func(  # type: ignore[override]
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """The function of what the forward step keeps of the batch, and of the model's output."""

        def of_words(loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output: Any) -> Loss:
            losses, order = output
            total, count, reported = per_token(losses, loss_mask)
            if order is not None and sentence_order is not None:
                loss = functional.cross_entropy(order.float().view(-1, 2), sentence_order.view(-1), ignore_index=-1)
                total, reported = total + loss * count, {**reported, "sop loss": reported_mean(loss)}
            return total, count, reported

        def of_classes(labels: torch.Tensor, logits: torch.Tensor) -> Loss:
            logits = logits.float()
            if num_labels == 1:
                loss = functional.mse_loss(logits.view(-1), labels.view(-1).float())
            elif labels.is_floating_point():
                loss = functional.binary_cross_entropy_with_logits(logits, labels)
            else:
                loss = functional.cross_entropy(logits.view(-1, num_labels), labels.view(-1))
            count = torch.tensor(len(logits), dtype=torch.int, device=logits.device)
            return loss * count, count, {"loss": reported_mean(loss)}

        return plugin_of(accelerator).custom_loss_function or (of_words if pretraining_flag else of_classes)

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> ForwardStep:
        """The function of an iterator and a model that gives an output, and the function of its loss."""

        def of_words(data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            tokens, types, order, loss_mask, labels, padding = self.get_batch(data_iterator)
            output = model(tokens, padding, tokentype_ids=types, lm_labels=labels.long().clamp_min(0))
            return output, partial(self.loss_func, loss_mask, order)

        def of_classes(data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            tokens, types, _, _, labels, padding = self.get_batch(data_iterator)
            output = model(tokens, padding, tokentype_ids=types)
            # Only the last stage has the two outputs.
            return output[1] if isinstance(output, tuple) else output, partial(self.loss_func, labels)

        return of_words if pretraining_flag else of_classes
