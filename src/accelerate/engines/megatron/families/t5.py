"""T5: an encoder and a decoder, positions as a bias on the scores of attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from accelerate.engines.megatron.conversion import Gated, Heads, Rule, TiedVocabulary, Vocabulary
from accelerate.engines.megatron.families.base import ModelFamily, Stage
from accelerate.engines.megatron.layers import activation, block, hide_padding, with_norm

_BIAS = "SelfAttention.relative_attention_bias.weight"


class T5(ModelFamily):
    """`T5ForConditionalGeneration`."""

    def check(self, model: Any, plugin: Any) -> None:
        super().check(model, plugin)
        if plugin.pp_degree > 1:
            raise ValueError(
                "megatron-core has no pipeline for models with an encoder and a decoder: train T5 with "
                "pp_degree=1, and shard it with tp_degree."
            )

    def settings(self, model: Any) -> dict[str, Any]:
        return {
            "num_layers": model.num_decoder_layers,
            "hidden_size": model.d_model,
            "num_attention_heads": model.num_heads,
            "kv_channels": model.d_kv,
            "ffn_hidden_size": model.d_ff,
            "layernorm_epsilon": model.layer_norm_epsilon,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": model.is_gated_act,
            "activation_func": activation(model.dense_act_fn),
            # T5 has the scale in its weights.
            "softmax_scale": 1.0,
        }

    def build(self, stage: Stage) -> nn.Module:
        from megatron.core.models.T5 import T5Model, t5_spec

        kind = "with_transformer_engine_default" if stage.transformer_engine else "with_local"
        encoder, decoder = (getattr(t5_spec, f"{part}_model_{kind}_spec")() for part in ("encoder", "decoder"))
        for layer in (encoder, decoder):
            with_norm(layer, transformer_engine=stage.transformer_engine)
            if not stage.transformer_engine:
                _with_biased_attention(layer)
        encoder_config = copy.copy(stage.config)
        encoder_config.num_layers = stage.model.num_layers
        engine = stage.transformer_engine
        model = T5Model(
            config=stage.config,
            encoder_config=encoder_config,
            transformer_encoder_layer_spec=block(encoder, stage.model.num_layers, transformer_engine=engine),
            transformer_decoder_layer_spec=block(decoder, stage.model.num_decoder_layers, transformer_engine=engine),
            vocab_size=stage.padded_vocab_size,
            max_sequence_length=getattr(stage.model, "n_positions", 512),
            share_embeddings_and_output_weights=stage.model.tie_word_embeddings,
            position_embedding_type="relative",
            relative_attention_num_buckets=stage.model.relative_attention_num_buckets,
            relative_attention_max_distance=stage.model.relative_attention_max_distance,
        )
        if stage.config.recompute_granularity is not None and not engine:
            _remake_bias(model)
        # megatron-core has a bias on the logits of tied weights, transformers a scale before them.
        model.output_layer.register_parameter("bias", None)
        if _scales(stage.model):
            scale = stage.model.d_model**-0.5
            model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * scale, *args[1:]))
        hide_padding(model, stage.model.vocab_size)
        return model

    def rules(self, model: Any) -> Sequence[Rule]:
        tied = model.tie_word_embeddings
        head = TiedVocabulary if tied else Vocabulary
        rules: list[Rule] = [
            Vocabulary("embedding.word_embeddings.weight", "shared.weight", model.vocab_size),
            head("lm_head.output_layer.weight", "shared.weight" if tied else "lm_head.weight", model.vocab_size),
        ]
        for part, mlp in (("encoder", 1), ("decoder", 2)):
            rules += [
                Rule(f"{part}.final_layernorm.weight", f"{part}.final_layer_norm.weight"),
                Rule(f"{part}_relative_pos_emb.relative_attention_bias.weight", f"{part}.block.0.layer.0.{_BIAS}"),
                *_layer(model, f"{part}.layers.{{}}.", f"{part}.block.{{}}.layer.", mlp),
            ]
        return [*rules, *_cross_attention(model, "decoder.layers.{}.", "decoder.block.{}.layer.1.")]

    def tied(self, model: Any) -> Mapping[str, str]:
        names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        return dict.fromkeys([*names, "lm_head.weight"] if model.tie_word_embeddings else names, "shared.weight")


def _layer(model: Any, of: str, its: str, mlp: int) -> Iterator[Rule]:
    """Attention and MLP, which is the second or the third part of a layer in transformers."""
    heads = {"sizes": [model.num_heads * model.d_kv] * 3, "groups": model.num_heads}
    projections = [f"{its}0.SelfAttention.{name}.weight" for name in "qkv"]
    dense = f"{its}{mlp}.DenseReluDense."
    yield Rule(f"{of}input_layernorm.weight", f"{its}0.layer_norm.weight")
    yield Heads(f"{of}self_attention.linear_qkv.weight", *projections, **heads)
    yield Rule(f"{of}self_attention.linear_proj.weight", f"{its}0.SelfAttention.o.weight")
    yield Rule(f"{of}pre_mlp_layernorm.weight", f"{its}{mlp}.layer_norm.weight")
    if model.is_gated_act:
        yield Gated(f"{of}mlp.linear_fc1.weight", f"{dense}wi_0.weight", f"{dense}wi_1.weight")
    else:
        yield Rule(f"{of}mlp.linear_fc1.weight", f"{dense}wi.weight")
    yield Rule(f"{of}mlp.linear_fc2.weight", f"{dense}wo.weight")


def _cross_attention(model: Any, of: str, its: str) -> Iterator[Rule]:
    heads = {"sizes": [model.num_heads * model.d_kv] * 2, "groups": model.num_heads}
    projections = [f"{its}EncDecAttention.{name}.weight" for name in "kv"]
    yield Rule(f"{of}pre_cross_attn_layernorm.weight", f"{its}layer_norm.weight")
    yield Rule(f"{of}cross_attention.linear_q.weight", f"{its}EncDecAttention.q.weight")
    yield Heads(f"{of}cross_attention.linear_kv.weight", *projections, **heads)
    yield Rule(f"{of}cross_attention.linear_proj.weight", f"{its}EncDecAttention.o.weight")


def _with_biased_attention(layer: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    from accelerate.engines.megatron.attention import BiasedAttention

    for attention in (layer.submodules.self_attention, layer.submodules.cross_attention):
        if attention is not IdentityOp:
            attention.submodules.core_attention = BiasedAttention


def _remake_bias(model: Any) -> None:
    """megatron-core gives all layers one bias, whose gradients activations that are computed again cannot reach."""
    for part, positions in (
        (model.encoder, model.encoder_relative_pos_emb),
        (model.decoder, model.decoder_relative_pos_emb),
    ):
        for layer in part.layers:
            layer.self_attention.core_attention.remade_by = (positions,)


def _scales(model: Any) -> bool:
    """Before version 5, transformers scaled exactly where weights are tied."""
    return bool(getattr(model, "scale_decoder_outputs", model.tie_word_embeddings))
