"""Models of transformers as megatron-core builds them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.engines.megatron.families import Stage, family_of
from accelerate.engines.megatron.layers import has_transformer_engine

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What Megatron-LM pads a vocabulary to a multiple of, for each tensor-parallel rank.
_VOCABULARY_MULTIPLE = 128
_LAST_STAGE = "num_layers_in_last_pipeline_stage"
# Other ways of megatron-core to divide layers, which it checks itself.
_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def transformer_config(plugin: Any, model_config: Any, dtype: torch.dtype) -> Any:
    """The config of megatron-core for a model of transformers.

    Args:
        plugin: The `MegatronLMPlugin`. Those of its arguments that megatron-core knows are used as they are;
            `other_megatron_args` come last and may set any field of a `TransformerConfig`.
        model_config: The config of transformers.
        dtype: The dtype of the parameters.
    """
    from megatron.core.transformer import TransformerConfig

    family = family_of(model_config)
    family.check(model_config, plugin)
    known = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    arguments = {name: value for name, value in plugin.megatron_lm_default_args.items() if name in known}
    settings = {**arguments, **family.settings(model_config)}
    settings.update(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        num_layers_in_last_pipeline_stage=plugin.decoder_last_pipeline_num_layers,
        **_virtual_stages(plugin, settings["num_layers"]),
    )
    settings.update({name: value for name, value in (plugin.other_megatron_args or {}).items() if name in known})
    if settings.get("recompute_granularity") != "full":
        settings.update(recompute_method=None, recompute_num_layers=None)
    engine = _uses_transformer_engine(plugin)
    settings["attention_backend"] = attention_backend(settings["attention_backend"], transformer_engine=engine)
    _check(settings, transformer_engine=engine)
    return TransformerConfig(**settings)


def attention_backend(asked: Any, *, transformer_engine: bool) -> Any:
    """How attention is computed, in the words of megatron-core.

    Args:
        asked: True leaves the choice to Transformer Engine, and False takes none of its fused kernels; in
            `other_megatron_args`, the name of one.
        transformer_engine: Whether the layers are its own. Those of megatron-core have one way.
    """
    from megatron.core.transformer.enums import AttnBackend

    name = getattr(asked, "name", asked)
    if isinstance(asked, bool):
        name = "auto" if asked or not transformer_engine else "unfused"
    if name not in AttnBackend.__members__:
        raise ValueError(
            f"attention_backend={asked!r} is not one of megatron-core's: {', '.join(AttnBackend.__members__)}."
        )
    if name not in ("auto", "local") and not transformer_engine:
        raise ImportError(
            f"attention_backend={name!r} needs Transformer Engine: `pip install transformer-engine`, or leave it out."
        )
    return AttnBackend[name]


def build_model(
    plugin: Any, model_config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> nn.Module:
    """The model of a pipeline stage, with weights drawn at random.

    Args:
        plugin: The `MegatronLMPlugin`.
        model_config: The config of transformers.
        pre_process: Whether this stage begins with the embeddings.
        post_process: Whether it ends with the logits.
        vp_stage: Which of its stages this is, where a rank has several.
    """
    arguments = plugin.megatron_lm_default_args
    dtype = next((dtype for name, dtype in _DTYPES.items() if arguments.get(name)), torch.float32)
    stage = Stage(
        model=model_config,
        config=transformer_config(plugin, model_config, dtype),
        arguments=arguments,
        padded_vocab_size=padded_vocab_size(arguments, model_config.vocab_size, plugin.tp_degree),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        transformer_engine=_uses_transformer_engine(plugin),
    )
    return family_of(model_config).build(stage)


def padded_vocab_size(arguments: Mapping[str, Any], vocab_size: int, tensor_ranks: int) -> int:
    """The rows of a vocabulary that can be divided by the ranks."""
    given: int | None = arguments.get("padded_vocab_size")
    multiple: int = arguments.get("make_vocab_size_divisible_by", _VOCABULARY_MULTIPLE) * tensor_ranks
    size = given or math.ceil(vocab_size / multiple) * multiple
    if size < vocab_size or size % tensor_ranks:
        raise ValueError(
            f"A vocabulary of {vocab_size} tokens does not fit into padded_vocab_size={size} over {tensor_ranks} "
            "tensor-parallel ranks: leave it out, or give a larger multiple."
        )
    return size


def _uses_transformer_engine(plugin: Any) -> bool:
    return plugin.megatron_lm_default_args.get("transformer_impl") != "local" and has_transformer_engine()


def _virtual_stages(plugin: Any, layers: int) -> dict[str, Any]:
    each = plugin.num_layers_per_virtual_pipeline_stage
    if each is None:
        return {}
    stages, rest = divmod(layers, each * plugin.pp_degree)
    if rest:
        raise ValueError(
            f"{layers} layers cannot be divided into {plugin.pp_degree} pipeline stages of "
            f"{each} layers each: change num_layers_per_virtual_pipeline_stage."
        )
    return {"virtual_pipeline_model_parallel_size": stages if stages > 1 else None}


def _check(settings: Mapping[str, Any], *, transformer_engine: bool) -> None:
    """Say early what megatron-core would say by an assertion deep inside."""
    _check_tensors(settings, settings["tensor_model_parallel_size"])
    if not any(settings.get(name) for name in _UNEVEN_STAGES):
        _check_stages(settings["num_layers"], settings["pipeline_model_parallel_size"], settings[_LAST_STAGE])
    if settings.get("context_parallel_size", 1) > 1 and not transformer_engine:
        raise ImportError(
            "Context parallelism of Megatron-LM needs Transformer Engine: `pip install transformer-engine`, or leave "
            "out context_parallel_size."
        )
    if settings.get("expert_model_parallel_size", 1) > 1:
        raise ValueError("No model that is built here has experts: leave out expert_model_parallel_size.")


def _check_tensors(settings: Mapping[str, Any], ranks: int) -> None:
    heads = settings["num_attention_heads"]
    for count, what in ((heads, "attention heads"), (settings["ffn_hidden_size"], "hidden sizes of an MLP")):
        if count % ranks:
            raise ValueError(f"{count} {what} cannot be divided over {ranks} tensor-parallel ranks: change tp_degree.")
    keys = settings.get("num_query_groups") or heads
    if max(keys, ranks) % min(keys, ranks):  # ranks may share one, and one rank may have several
        raise ValueError(
            f"{keys} key-value heads cannot be divided over {ranks} tensor-parallel ranks: change tp_degree."
        )


def _check_stages(layers: int, stages: int, last: int | None) -> None:
    rest, others = (layers, stages) if last is None else (layers - last, stages - 1)
    if others < 1 or rest < others or rest % others:
        raise ValueError(
            f"{layers} layers cannot be divided evenly into {stages} pipeline stages"
            + (": change pp_degree, or set" if last is None else f", of which the last has {last}: change pp_degree or")
            + " decoder_last_pipeline_num_layers."
        )
