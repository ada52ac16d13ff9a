"""The kinds of models that are built for Megatron-LM, by the `model_type` of their transformers config."""

from __future__ import annotations

from typing import Any

from accelerate.engines.megatron.families.base import ModelFamily, Stage
from accelerate.engines.megatron.families.bert import Bert
from accelerate.engines.megatron.families.gpt2 import GPT2
from accelerate.engines.megatron.families.llama import Llama
from accelerate.engines.megatron.families.t5 import T5

FAMILIES: dict[str, ModelFamily] = {
    "gpt2": GPT2(),
    "llama": Llama(),
    "megatron-bert": Bert(),
    "t5": T5(),
}


def family_of(model_config: Any) -> ModelFamily:
    """The kind of a model."""
    kind = model_config.model_type
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"Models of the type {kind!r} cannot be built for Megatron-LM, only {known}: build others in a function "
            "of your own, `MegatronLMPlugin(custom_model_provider_function=...)`."
        )
    return FAMILIES[kind]


__all__ = ["FAMILIES", "ModelFamily", "Stage", "family_of"]
