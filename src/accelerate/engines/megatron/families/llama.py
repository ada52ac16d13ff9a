"""Llama: rotary positions, RMSNorm, a gated MLP, and keys that several queries share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from accelerate.engines.megatron.conversion import Gated, Heads, Rule
from accelerate.engines.megatron.families.base import Stage
from accelerate.engines.megatron.families.decoder import Decoder
from accelerate.engines.megatron.layers import activation

# How transformers stretches rotary positions without changing the attention.
_SCALED = ("linear", "llama3")


class Llama(Decoder):
    """`LlamaForCausalLM`."""

    prefix = "model."
    words = "model.embed_tokens.weight"
    buffers = (".rotary_emb.inv_freq",)
    rotary = True

    def check(self, model: Any, plugin: Any) -> None:
        super().check(model, plugin)
        if model.attention_bias != model.mlp_bias:
            raise ValueError(
                f"megatron-core has biases in attention and MLP, or in none: attention_bias={model.attention_bias} "
                f"and mlp_bias={model.mlp_bias} must be the same."
            )
        kind = _rotary(model)["rope_type"]
        if kind not in ("default", *_SCALED):
            raise ValueError(
                f"Rotary positions of the type {kind!r} cannot be built for Megatron-LM: use default, linear or llama3."
            )

    def settings(self, model: Any) -> dict[str, Any]:
        return {
            "num_layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.num_key_value_heads,
            "kv_channels": _head_size(model),
            "ffn_hidden_size": model.intermediate_size,
            "layernorm_epsilon": model.rms_norm_eps,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": activation(model.hidden_act),
            "add_bias_linear": model.mlp_bias,
            "init_method_std": model.initializer_range,
        }

    def positions(self, model: Any) -> dict[str, Any]:
        return {
            "position_embedding_type": "rope",
            "rotary_base": _rotary(model)["rope_theta"],
            "max_sequence_length": model.max_position_embeddings,
        }

    def build(self, stage: Stage) -> nn.Module:
        model: Any = super().build(stage)
        kind = _rotary(stage.model)["rope_type"]
        if kind in _SCALED:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            rotary = model.rotary_pos_emb
            rotary.inv_freq = ROPE_INIT_FUNCTIONS[kind](stage.model, rotary.inv_freq.device)[0]
        return model

    def rules(self, model: Any) -> Sequence[Rule]:
        size, groups = _head_size(model), model.num_key_value_heads
        sizes = [model.num_attention_heads * size, groups * size, groups * size]
        of, its = "decoder.layers.{}.", "model.layers.{}."
        rules: list[Rule] = [
            *self.vocabulary(model),
            Rule("decoder.final_layernorm.weight", "model.norm.weight"),
            Rule(f"{of}input_layernorm.weight", f"{its}input_layernorm.weight"),
            Rule(f"{of}pre_mlp_layernorm.weight", f"{its}post_attention_layernorm.weight"),
        ]
        for kind in ("weight", "bias"):
            projections = [f"{its}self_attn.{name}_proj.{kind}" for name in "qkv"]
            rules += [
                Heads(f"{of}self_attention.linear_qkv.{kind}", *projections, sizes=sizes, groups=groups),
                Rule(f"{of}self_attention.linear_proj.{kind}", f"{its}self_attn.o_proj.{kind}"),
                Gated(f"{of}mlp.linear_fc1.{kind}", f"{its}mlp.gate_proj.{kind}", f"{its}mlp.up_proj.{kind}"),
                Rule(f"{of}mlp.linear_fc2.{kind}", f"{its}mlp.down_proj.{kind}"),
            ]
        return rules


def _head_size(model: Any) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def _rotary(model: Any) -> dict[str, Any]:
    """Before version 5, transformers had the base beside the other settings."""
    found = getattr(model, "rope_parameters", None)
    if found is None:
        found = {"rope_theta": model.rope_theta, **(getattr(model, "rope_scaling", None) or {})}
    return {"rope_type": "default", **found}
