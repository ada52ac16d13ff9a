"""Compiling the repeated blocks of a model once each, instead of the whole model."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn


def is_compiled_module(module: nn.Module) -> bool:
    """Says whether a module is what `torch.compile` returned."""
    # Not imported for the question's sake, which takes seconds: while it is not, no module is one.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Says whether a module or a part of it is compiled."""
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Says whether a module is a list of blocks of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Says whether a module or a part of it is such a list."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compiles each repeated block, and each other part, by itself; equal blocks share one compilation.

    A model without repeated blocks is compiled as a whole. Otherwise the answer is a module of the same class
    that shares all but its children with the given one, which stays as it was and is kept as `_orig_mod`.
    """
    compiled = _compile(module, compile_kwargs, {})
    if not is_compiled_module(compiled):
        # Past the bookkeeping of nn.Module: as a child, the original would appear in the state dict.
        compiled.__dict__["_orig_mod"] = module
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compiles each repeated block in place, so that the hooks of a sharded model stay where they are.

    A model without repeated blocks is compiled as a whole, in place.
    """
    blocks = [block for part in module.modules() if is_repeated_blocks(part) for block in part.children()]
    for block in blocks or [module]:
        block.compile(**compile_kwargs)
    return module


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
    shell = _shallow_copy(module)
    for name, child in module._modules.items():
        if child is not None and repeated:
            done.setdefault(child, torch.compile(child, **compile_kwargs))  # type: ignore[arg-type]
        if child is not None:
            shell._modules[name] = _compile(child, compile_kwargs, done)
    return shell


def _shallow_copy(module: nn.Module) -> nn.Module:
    shell = module.__class__.__new__(module.__class__)
    shell.__dict__.update(module.__dict__)
    shell.__dict__["_modules"] = dict(module._modules)
    for name, value in module.__dict__.items():
        # A forward that was put on the instance would go on to run the original's children.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            shell.__dict__[name] = types.MethodType(value.__func__, shell)
    return shell
