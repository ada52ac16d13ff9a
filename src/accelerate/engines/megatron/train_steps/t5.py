"""The train step of T5."""

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


class T5TrainStep(AbstractTrainStep):
    """The step of a T5. In its masks, True is what may not be looked at."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = output_class("Seq2SeqLMOutput", args)

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """From which positions of a padded sequence to which others."""
        return attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """From each position to those after it."""
        return torch.ones(1, seq_length, seq_length, device=device).tril() < 0.5

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str) -> torch.Tensor:
        """From each position of the decoder to the padding of the encoder."""
        here = torch.ones(attention_mask.shape[0], dec_seq_length, 1, device=device)
        return attention_mask.unsqueeze(1) * here < 0.5

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> GetBatch:
        """The function that gives the tokens of both, loss mask, labels, and the three masks of attention."""

        start: int = getattr(plugin_of(accelerator).model_config, "decoder_start_token_id", None) or 0

        def of_megatron(data_iterator: Any) -> tuple[torch.Tensor, ...]:
            keys = ["text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask"]
            batch = broadcast(data_iterator, keys)
            masks = [batch[key] < 0.5 for key in keys[4:]]
            return batch["text_enc"], batch["text_dec"], batch["loss_mask"].float(), batch["labels"], *masks

        def of_transformers(data_iterator: Any) -> tuple[torch.Tensor, ...]:
            batch = taken(data_iterator, "input_ids", "labels")
            tokens, labels = batch["input_ids"].long(), batch["labels"].long()
            padding = batch.get("attention_mask")
            padding = torch.ones_like(tokens) if padding is None else padding.long()
            decoder = batch.get("decoder_input_ids")
            if decoder is None:
                # What was to be said so far.
                decoder = functional.pad(labels[:, :-1], (1, 0), value=start).clamp_min(0)
            length, device = decoder.shape[1], decoder.device
            masks = (
                self.attn_mask_postprocess(padding),
                self.get_decoder_mask(length, device),
                self.get_enc_dec_mask(padding, length, device),
            )
            return tokens, decoder.long(), (labels != -100).float(), labels.clamp_min(0), *masks

        return plugin_of(accelerator).custom_get_batch_function or (
            of_megatron if megatron_dataset_flag else of_transformers
        )

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """The function of a loss mask and the losses."""

        def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
            return per_token(losses, loss_mask)

        return plugin_of(accelerator).custom_loss_function or loss_func

    def get_forward_step_func(self) -> ForwardStep:
        """The function of an iterator and a model that gives an output, and the function of its loss."""

        def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            tokens, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            # One mask for all heads.
            output = model(tokens, decoder, *(mask.unsqueeze(1) for mask in masks), lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step
