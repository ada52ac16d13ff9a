"""Tiny models of transformers, and the same on megatron-core, for the worlds of this folder."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from accelerate.utils import MegatronLMPlugin

VOCABULARY = 99  # which no number of ranks divides: it is padded

_GPT2 = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 5,
}

DECODERS: dict[str, tuple[Any, Any]] = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**_GPT2)),
    "gpt2, head of its own": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(**_GPT2, tie_word_embeddings=False, n_inner=48, activation_function="relu"),
    ),
    "llama, shared keys": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**_LLAMA, num_key_value_heads=2),
    ),
    "llama, one key, tied, biases, stretched": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **_LLAMA,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=_STRETCHED,
        ),
    ),
}
BERT = transformers.MegatronBertConfig(**_BERT)
T5S: dict[str, Any] = {
    "t5": transformers.T5Config(**_T5),
    "t5, gated": transformers.T5Config(
        **_T5, num_decoder_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
}


def model(kind: Any, config: Any, seed: int = 0) -> Any:
    """A model whose weights are all random, also those that transformers begins with 0 or 1."""
    torch.manual_seed(seed)
    made = kind(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return made


def begin(tensor: int, pipeline: int) -> None:
    """Make the groups of a world."""
    import torch.distributed as dist

    from tests.megatron import on_cpu

    on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(1)


def plugin(tensor: int, pipeline: int, **settings: Any) -> MegatronLMPlugin:
    return MegatronLMPlugin(tp_degree=tensor, pp_degree=pipeline, **settings)


def chunks(settings: MegatronLMPlugin, config: Any) -> list[Any]:
    """The stages that this rank has, with weights drawn at random."""
    from megatron.core import parallel_state

    from accelerate.engines.megatron.models import build_model

    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    made = build_model(settings, config, pre_process=stage == 0, post_process=stage == stages - 1)
    return [made.eval()]


def run(stage: Any, hidden: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """The outputs of a model of one or several stages on the last of them; None on the others."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            received = torch.empty(hidden)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            stage.set_input_tensor(received)
        output = stage(*args, **kwargs)
        if parallel_state.is_pipeline_last_stage():
            return output
        dist.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
        return None


def whole(logits: torch.Tensor) -> torch.Tensor:
    """The logits of all tensor-parallel ranks, without those of padding."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)[..., :VOCABULARY]
