"""Weights kept in a small dtype, and computed with in a larger one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from accelerate.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accelerate.hooks.align import align_hooks
from accelerate.hooks.base import ModelHook, add_hook_to_module
from accelerate.torch_internals.compile import outside_graphs


class LayerwiseCastingHook(ModelHook):
    """Keep the weights of a module in one dtype, and cast them to another for its forward.

    Args:
        storage_dtype: the dtype they are kept in.
        compute_dtype: the dtype of the forward.
        non_blocking: cast without waiting for the device.
    """

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
            hook.cast_placeholders(self.storage_dtype)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in one dtype, and compute in another.

    Args:
        module: the model.
        storage_dtype: the dtype the weights are kept in.
        compute_dtype: the dtype of the forward.
        skip_modules_pattern: regular expressions. Modules whose name matches one stay as they are, with all submodules.
        skip_modules_classes: classes of modules that stay as they are, with all submodules.
        non_blocking: cast without waiting for the device.

    Example:
        ```python
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=["norm"])
        ```
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
