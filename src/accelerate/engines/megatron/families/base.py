"""What differs between the kinds of models: their sizes, how they are built, and the names of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from accelerate.engines.megatron.conversion import Rule


@dataclass(frozen=True)
class Stage:
    """The part of a model that is built.

    Attributes:
        model: The config of transformers.
        config: The config of megatron-core.
        arguments: What the plugin passes to Megatron-LM.
        padded_vocab_size: The rows of the vocabulary over all tensor-parallel ranks.
        pre_process: Whether this pipeline stage begins with the embeddings.
        post_process: Whether it ends with the logits.
        vp_stage: Which of its stages this is, where a rank has several.
        transformer_engine: Whether its layers are Transformer Engine's.
    """

    model: Any
    config: Any
    arguments: Mapping[str, Any]
    padded_vocab_size: int
    pre_process: bool
    post_process: bool
    vp_stage: int | None
    transformer_engine: bool


class ModelFamily:
    """One kind of models, by `model_type` of its transformers config."""

    # What the names of the weights begin with in a model with a head; files of the model alone leave it out.
    prefix: ClassVar[str] = ""
    # The ends of names in a state dict that are no weights.
    buffers: ClassVar[tuple[str, ...]] = ()
    # Settings of transformers' config for which megatron-core has no counterpart, and what they have to be.
    required: ClassVar[Mapping[str, Any]] = {}
    # Whether its positions are rotary ones, and whether its train step can return logits.
    rotary: ClassVar[bool] = False
    returns_logits: ClassVar[bool] = False

    def check(self, model: Any, plugin: Any) -> None:
        """Refuse a config that would become another model."""
        for name, value in self.required.items():
            found = getattr(model, name, value)
            if found != value:
                raise ValueError(
                    f"megatron-core has no {model.model_type} with {name}={found!r}: it must be {value!r}."
                )
        if self.rotary and not plugin.use_rotary_position_embeddings:
            raise ValueError(
                f"The positions of a {model.model_type} are rotary, and use_rotary_position_embeddings=False would "
                "make it another model: leave it out."
            )
        if plugin.return_logits and not self.returns_logits and plugin.custom_train_step_class is None:
            raise ValueError(
                f"The train step of a {model.model_type} returns no logits, but return_logits=True is set: leave it "
                "out, or give the MegatronLMPlugin a `custom_train_step_class`."
            )

    def settings(self, model: Any) -> dict[str, Any]:
        """The fields of megatron-core's `TransformerConfig` that describe the model."""
        raise NotImplementedError

    def build(self, stage: Stage) -> nn.Module:
        """The model of a stage, with an attribute `vocab_size` for the padded vocabulary."""
        raise NotImplementedError

    def rules(self, model: Any) -> Sequence[Rule]:
        """How each parameter of megatron-core is made."""
        raise NotImplementedError

    def tied(self, model: Any) -> Mapping[str, str]:
        """Names in transformers' state dict that stand for the weight of another name."""
        return {}
