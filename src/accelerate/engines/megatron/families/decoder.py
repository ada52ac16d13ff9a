"""Decoders that are megatron-core's `GPTModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from accelerate.engines.megatron.conversion import Rule, TiedVocabulary, Vocabulary
from accelerate.engines.megatron.families.base import ModelFamily, Stage
from accelerate.engines.megatron.layers import block, hide_padding, with_norm


class Decoder(ModelFamily):
    """A model with causal attention and a head over the vocabulary."""

    returns_logits = True
    # What transformers calls the embeddings, which may be the weights of the head as well.
    words: ClassVar[str]

    def positions(self, model: Any) -> dict[str, Any]:
        """The arguments of `GPTModel` about positions."""
        raise NotImplementedError

    def vocabulary(self, model: Any) -> list[Rule]:
        """How embeddings and head are made."""
        embeddings = Vocabulary("embedding.word_embeddings.weight", self.words, model.vocab_size)
        if model.tie_word_embeddings:
            return [embeddings, TiedVocabulary("output_layer.weight", self.words, model.vocab_size)]
        return [embeddings, Vocabulary("output_layer.weight", "lm_head.weight", model.vocab_size)]

    def tied(self, model: Any) -> Mapping[str, str]:
        return {"lm_head.weight": self.words} if model.tie_word_embeddings else {}

    def build(self, stage: Stage) -> nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        if stage.transformer_engine:
            layer = get_gpt_layer_with_transformer_engine_spec()
        else:
            layer = get_gpt_layer_local_spec(normalization=stage.config.normalization)
        layer = with_norm(layer, transformer_engine=stage.transformer_engine)
        model = GPTModel(
            config=stage.config,
            transformer_layer_spec=block(
                layer,
                get_num_layers_to_build(stage.config, vp_stage=stage.vp_stage),
                transformer_engine=stage.transformer_engine,
            ),
            vocab_size=stage.padded_vocab_size,
            pre_process=stage.pre_process,
            post_process=stage.post_process,
            share_embeddings_and_output_weights=stage.model.tie_word_embeddings,
            vp_stage=stage.vp_stage,
            **self.positions(stage.model),
        )
        if stage.post_process:
            hide_padding(model, stage.model.vocab_size)
        return model
