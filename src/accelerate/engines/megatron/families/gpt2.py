"""GPT-2: learned positions, LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.engines.megatron.conversion import FusedHeads, Rule, Transposed
from accelerate.engines.megatron.families.decoder import Decoder
from accelerate.engines.megatron.layers import activation


class GPT2(Decoder):
    """`GPT2LMHeadModel`."""

    prefix = "transformer."
    words = "transformer.wte.weight"
    buffers = (".attn.bias", ".attn.masked_bias")
    required = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

    def settings(self, model: Any) -> dict[str, Any]:
        return {
            "num_layers": model.n_layer,
            "hidden_size": model.n_embd,
            "num_attention_heads": model.n_head,
            "ffn_hidden_size": model.n_inner or 4 * model.n_embd,
            "layernorm_epsilon": model.layer_norm_epsilon,
            "activation_func": activation(model.activation_function),
            "init_method_std": model.initializer_range,
        }

    def positions(self, model: Any) -> dict[str, Any]:
        return {"position_embedding_type": "learned_absolute", "max_sequence_length": model.n_positions}

    def rules(self, model: Any) -> Sequence[Rule]:
        heads = {"sizes": [model.n_embd] * 3, "groups": model.n_head}
        of, its = "decoder.layers.{}.", "transformer.h.{}."
        rules: list[Rule] = [
            *self.vocabulary(model),
            Rule("embedding.position_embeddings.weight", "transformer.wpe.weight"),
        ]
        for kind in ("weight", "bias"):
            linear = Transposed if kind == "weight" else Rule
            rules += [
                Rule(f"decoder.final_layernorm.{kind}", f"transformer.ln_f.{kind}"),
                Rule(f"{of}input_layernorm.{kind}", f"{its}ln_1.{kind}"),
                Rule(f"{of}pre_mlp_layernorm.{kind}", f"{its}ln_2.{kind}"),
                FusedHeads(f"{of}self_attention.linear_qkv.{kind}", f"{its}attn.c_attn.{kind}", **heads),
                linear(f"{of}self_attention.linear_proj.{kind}", f"{its}attn.c_proj.{kind}"),
                linear(f"{of}mlp.linear_fc1.{kind}", f"{its}mlp.c_fc.{kind}"),
                linear(f"{of}mlp.linear_fc2.{kind}", f"{its}mlp.c_proj.{kind}"),
            ]
        return rules
