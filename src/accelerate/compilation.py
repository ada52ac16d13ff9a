"""Compiling the repeated blocks of a model once each, instead of the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.torch_internals.compile import ORIGINAL, is_compiled
from accelerate.torch_internals.modules import children_of, with_own_children


def is_compiled_module(module: nn.Module) -> bool:
    """Tell whether a module was returned by `torch.compile`.

    Args:
        module: any module.
    """
    return is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Tell whether a module or one of its submodules is compiled.

    Args:
        module: any module.
    """
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether a module is a list of blocks of one class.

    Args:
        module: any module.
    """
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether a module is, or contains, a list of blocks of one class.

    Args:
        module: any module.
    """
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block, and each other submodule, on its own; equal blocks share one compilation.

    A model without repeated blocks is compiled as a whole.

    Args:
        module: the model. It stays as it is, and is kept as `_orig_mod` of the result.
        compile_kwargs: arguments for `torch.compile`.

    Returns:
        A module of the same class with compiled children, which shares everything else with the original.
    """
    compiled = _compile(module, compile_kwargs, {})
    if not is_compiled_module(compiled):
        # Past the bookkeeping of nn.Module: as a child, the original would appear in the state dict.
        compiled.__dict__[ORIGINAL] = module
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block in place, so that the hooks of a sharded model stay where they are.

    A model without repeated blocks is compiled as a whole, in place.

    Args:
        module: the model.
        compile_kwargs: arguments for `torch.compile`.

    Returns:
        The model.
    """
    blocks = [block for part in module.modules() if is_repeated_blocks(part) for block in part.children()]
    for block in blocks or [module]:
        block.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile each repeated block, and each other submodule, in place.

    An engine of DeepSpeed holds on to the modules, so they cannot be replaced.

    Args:
        module: the model.
        compile_kwargs: arguments for `torch.compile`.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for part in module.children():
            compile_regions_deepspeed(part, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)


def _compile(module: nn.Module, compile_kwargs: dict[str, Any], done: dict[nn.Module, nn.Module]) -> nn.Module:
    # A module that is used in two places stays one module.
    if module not in done:
        done[module] = _compile_one(module, compile_kwargs, done)
    return done[module]


def _compile_one(module: nn.Module, compile_kwargs: dict[str, Any], done: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return module
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_repeated_blocks(module):
        return torch.compile(module, **compile_kwargs)  # type: ignore[return-value]
    repeated = is_repeated_blocks(module)
    shell = with_own_children(module)
    for name, child in children_of(module).items():
        if child is not None and repeated:
            done.setdefault(child, torch.compile(child, **compile_kwargs))  # type: ignore[arg-type]
        if child is not None:
            children_of(shell)[name] = _compile(child, compile_kwargs, done)
    return shell
