"""Keeping the weights of the large layers in a small dtype."""

from __future__ import annotations

import re

import torch
from torch import nn

from accelerate.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accelerate.hooks.base import add_hook_to_module
from accelerate.hooks.casting import LayerwiseCastingHook


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in `storage_dtype`, and compute in `compute_dtype`.

    skip_modules_pattern: regular expressions; modules whose name has a match stay as they are, with all inside.
    skip_modules_classes: classes that stay as they are. non_blocking: whether casts may wait for nothing.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())

    def visit(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for child_name, child in part.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")
