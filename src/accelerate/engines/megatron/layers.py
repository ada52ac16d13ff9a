"""The layers that models are built of: Transformer Engine's where it is installed, megatron-core's own elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def has_transformer_engine() -> bool:
    """Whether megatron-core has found Transformer Engine."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


class Norm:
    """torch's norm with the arguments of megatron-core.

    Unlike megatron-core's own, it also serves with sequence parallelism: each rank has normalized other tokens, so the
    gradients of its weights have to be summed over the tensor-parallel ranks, which the mark on them asks for.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:  # type: ignore[misc]
        made: nn.Module = _NORMS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


_NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}

# What the activations of transformers are called in torch.
ACTIVATIONS: dict[str, Any] = {
    "gelu": nn.functional.gelu,
    "gelu_new": partial(nn.functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
}


def activation(name: str) -> Any:
    """The function of an activation by its name in transformers."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"Megatron-LM models here have no activation {name!r}: use one of {known}.")
    return ACTIVATIONS[name]


def with_norm(layer: Any, *, transformer_engine: bool) -> Any:
    """A layer whose norms are ours, unless they are Transformer Engine's."""
    if not transformer_engine:
        for place in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
            if not _is_identity(getattr(layer.submodules, place)):
                setattr(layer.submodules, place, Norm)
    return layer


def block(layer: Any, count: int, *, transformer_engine: bool) -> Any:
    """A number of equal layers, and the norm after the last."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm: Any = Norm
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _is_identity(module: Any) -> bool:
    from megatron.core.transformer.identity_op import IdentityOp

    return module is IdentityOp


def hide_padding(model: Any, vocab_size: int) -> None:
    """Have the logits of padding in the vocabulary count for nothing: no probability, no gradient, never sampled."""
    from megatron.core import parallel_state

    def mask(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        width = logits.shape[-1]
        first = 0 if width == model.vocab_size else width * rank
        logits[..., max(vocab_size - first, 0) :] = torch.finfo(logits.dtype).min

    rank = parallel_state.get_tensor_model_parallel_rank()
    if model.vocab_size > vocab_size:
        model.output_layer.register_forward_hook(mask)
