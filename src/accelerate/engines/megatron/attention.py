"""Attention with a bias on its scores, which megatron-core has with Transformer Engine only."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType


class BiasedAttention(DotProductAttention):
    """The same by torch's own function, which takes the bias. In masks, True is what may not be looked at."""

    # What makes the bias, where it has to be made again for the backward of each layer. In a tuple, so that its weights
    # are not those of this layer, too.
    remade_by: tuple[torch.nn.Module, ...] = ()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """From (length, batch, heads, size) to (length, batch, heads * size)."""
        if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
            attention_mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).triu(1)
        scores = attention_bias
        for positions in self.remade_by:
            # Heads last, as they are what is shared out.
            whole = positions(len(query), len(key)).permute(0, 2, 3, 1)
            scores = tensor_parallel.scatter_to_tensor_model_parallel_region(whole).permute(0, 3, 1, 2)
        if attention_mask is not None:
            scores = query.new_zeros(()) if scores is None else scores
            # Not -inf: a row that may look at nothing, as that of padding, would be nan.
            scores = torch.where(attention_mask, torch.finfo(query.dtype).min, scores.to(query.dtype))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with tensor_parallel.get_cuda_rng_tracker().fork():
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=scores,
                dropout_p=self.attention_dropout.p if self.training else 0.0,
                scale=self.softmax_scale,
            )
        return context.permute(2, 0, 1, 3).flatten(2)
