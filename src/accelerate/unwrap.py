"""Getting the user's model back from under the wrappers that were put around it."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn

from accelerate.torch_internals.compile import ORIGINAL, compiled_like, is_compiled, original_of

Kind = TypeVar("Kind", bound=nn.Module)


def find_wrapper(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return the wrapper of a model, also underneath torch.compile.

    Args:
        model: what `prepare` returned, or what is in it.
        kind: the class of the wrapper.
    """
    # A wrapper with compiled regions is one itself, beside the original that it keeps.
    found = model if isinstance(model, kind) else original_of(model)
    return found if isinstance(found, kind) else None


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Remove the wrappers of parallel training from a model, and on request those of precision and compilation.

    Args:
        model: what `prepare` returned.
        keep_fp32_wrapper: keep a `forward` that runs in mixed precision and returns fp32.
        keep_torch_compile: keep the model compiled.
        recursive: unwrap submodules as well, in place.

    Returns:
        The model.
    """
    wrappers = _wrapper_classes()
    while True:
        if _is_compiled(model) and not keep_torch_compile:
            model = original_of(model)
        elif isinstance(model, wrappers):
            model = model.module
        else:
            break
    if is_compiled(model):
        inner = extract_model_from_parallel(original_of(model), keep_fp32_wrapper, keep_torch_compile, recursive)
        # A new compiled module, not a changed one: training goes on with the wrapper inside the old one.
        return model if inner is original_of(model) else compiled_like(model, inner)
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    if not keep_fp32_wrapper:
        _restore_forward(model)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model from under all its wrappers, and not compiled."""
    found: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return found


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer of the script, whether it was prepared or not."""
    return getattr(optimizer, "optimizer", optimizer)


def _is_compiled(model: Any) -> bool:
    # A module with compiled regions keeps the original beside its own children (see accelerate.compilation).
    return is_compiled(model) or ORIGINAL in getattr(model, "__dict__", {})


# The classes of engines, which keep the model they wrap as `module`. One set for the process, as classes are.
_wrappers: set[type] = {nn.parallel.DistributedDataParallel, nn.DataParallel}


def add_wrappers(*classes: type) -> None:
    """Have models taken out of these classes, too."""
    _wrappers.update(classes)


def _wrapper_classes() -> tuple[Any, ...]:
    # A script may use FSDP by itself. Not imported for the question's sake: while it is not, no model is one.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (*_wrappers,) if fsdp is None else (*_wrappers, fsdp.FullyShardedDataParallel)


def _restore_forward(model: Any) -> None:
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.forward = original
