"""fp8 with torchao: which linear layers are converted, and converting them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accelerate.available import torchao_required

# The smallest piece of a matrix that the hardware multiplies in fp8.
_PIECE = 16


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and of the last linear layer: they are the ones that suffer most from fp8."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Whether a module of this name can be converted: if its sizes suit fp8, and it is not to be left out."""
    if isinstance(module, nn.Linear) and (module.in_features % _PIECE or module.out_features % _PIECE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the part of this name can be converted, being neither the first nor the last linear layer of `module`."""
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module, fqn, [name for name in (first, last) if name is not None])


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether a part of the model was converted."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Convert linear layers in place; by default all whose sizes suit but the first and the last."""
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
