"""BERT as Megatron-LM has it, with the norms before attention and MLP: `megatron-bert` in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.engines.megatron.conversion import Heads, Rule, TiedVocabulary, Vocabulary
from accelerate.engines.megatron.families.base import ModelFamily, Stage
from accelerate.engines.megatron.layers import activation, hide_padding, with_norm

_WORDS = "bert.embeddings.word_embeddings.weight"


class Bert(ModelFamily):
    """`MegatronBertForMaskedLM`, `...ForPreTraining` (by the argument `bert_binary_head`), and a classifier."""

    prefix = "bert."
    buffers = (".position_ids",)
    # The head over the vocabulary is megatron-core's, which has this one.
    required = {"hidden_act": "gelu", "is_decoder": False, "tie_word_embeddings": True}

    def check(self, model: Any, plugin: Any) -> None:
        super().check(model, plugin)
        if plugin.sequence_parallelism:
            raise ValueError(
                "megatron-core's BERT has no sequence parallelism without apex: leave out sequence_parallelism."
            )

    def settings(self, model: Any) -> dict[str, Any]:
        return {
            "num_layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "ffn_hidden_size": model.intermediate_size,
            "layernorm_epsilon": model.layer_norm_eps,
            "activation_func": activation(model.hidden_act),
            "init_method_std": model.initializer_range,
        }

    def build(self, stage: Stage) -> nn.Module:
        from megatron.core.models.bert.bert_layer_specs import (
            bert_layer_local_spec,
            get_bert_layer_with_transformer_engine_spec,
        )
        from megatron.core.models.bert.bert_model import BertModel

        local = not stage.transformer_engine
        layer = bert_layer_local_spec if local else get_bert_layer_with_transformer_engine_spec()
        classifies = not stage.arguments.get("pretraining_flag", True)
        model = BertModel(
            config=stage.config,
            num_tokentypes=stage.model.type_vocab_size,
            transformer_layer_spec=with_norm(layer, transformer_engine=stage.transformer_engine),
            vocab_size=stage.padded_vocab_size,
            max_sequence_length=stage.model.max_position_embeddings,
            pre_process=stage.pre_process,
            post_process=stage.post_process,
            share_embeddings_and_output_weights=not classifies,
            add_binary_head=classifies or bool(stage.arguments.get("bert_binary_head")),
            vp_stage=stage.vp_stage,
        )
        if stage.post_process and classifies:
            _classify(model, stage)
        elif stage.post_process:
            hide_padding(model, stage.model.vocab_size)
        return model

    def rules(self, model: Any) -> Sequence[Rule]:
        of, its = "encoder.layers.{}.", "bert.encoder.layer.{}."
        heads = {"sizes": [model.hidden_size] * 3, "groups": model.num_attention_heads}
        rules: list[Rule] = [
            Vocabulary("embedding.word_embeddings.weight", _WORDS, model.vocab_size),
            TiedVocabulary("output_layer.weight", _WORDS, model.vocab_size),
            Vocabulary("output_layer.bias", "cls.predictions.bias", model.vocab_size),
            Rule("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight"),
            Rule("embedding.tokentype_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"),
        ]
        for kind in ("weight", "bias"):
            projections = [f"{its}attention.self.{name}.{kind}" for name in ("query", "key", "value")]
            rules += [
                Heads(f"{of}self_attention.linear_qkv.{kind}", *projections, **heads),
                Rule(f"{of}input_layernorm.{kind}", f"{its}attention.ln.{kind}"),
                Rule(f"{of}self_attention.linear_proj.{kind}", f"{its}attention.output.dense.{kind}"),
                Rule(f"{of}pre_mlp_layernorm.{kind}", f"{its}ln.{kind}"),
                Rule(f"{of}mlp.linear_fc1.{kind}", f"{its}intermediate.dense.{kind}"),
                Rule(f"{of}mlp.linear_fc2.{kind}", f"{its}output.dense.{kind}"),
                Rule(f"encoder.final_layernorm.{kind}", f"bert.encoder.ln.{kind}"),
                Rule(f"lm_head.dense.{kind}", f"cls.predictions.transform.dense.{kind}"),
                Rule(f"lm_head.layer_norm.{kind}", f"cls.predictions.transform.LayerNorm.{kind}"),
                Rule(f"pooler.dense.{kind}", f"bert.pooler.dense.{kind}"),
                Rule(f"binary_head.{kind}", f"cls.seq_relationship.{kind}"),
                Rule(f"binary_head.1.{kind}", f"classifier.{kind}"),
            ]
        return rules

    def tied(self, model: Any) -> Mapping[str, str]:
        return {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"}


class _NoHead(nn.Module):
    """Stands where `BertModel` has its head over the vocabulary, which a classifier does not need."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _NoLogits(nn.Module):
    """Stands where it computes logits."""

    def forward(self, hidden_states: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def _classify(model: Any, stage: Stage) -> None:
    """Have the second output be the logits of classes."""
    model.lm_head, model.output_layer = _NoHead(), _NoLogits()
    linear = nn.Linear(stage.config.hidden_size, stage.model.num_labels)
    stage.config.init_method(linear.weight)
    nn.init.zeros_(linear.bias)
    device = model.pooler.dense.weight.device
    model.binary_head = nn.Sequential(nn.Dropout(stage.config.hidden_dropout), linear).to(device)
