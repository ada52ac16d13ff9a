"""Weights kept in a small dtype, and computed with in a larger one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.graphs import outside_graphs
from accelerate.hooks.align import align_hooks
from accelerate.hooks.base import ModelHook


class LayerwiseCastingHook(ModelHook):
    """Keeps the weights of a module in `storage_dtype`, and casts them to `compute_dtype` for its forward."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.after_error(module)
        return output

    @outside_graphs
    def after_error(self, module: nn.Module) -> None:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        for hook in align_hooks(module):
            hook.cast_stand_ins(self.storage_dtype)
