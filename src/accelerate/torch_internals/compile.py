"""torch.compile: the module that it returns, the one inside, and functions that stay out of its graphs."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

# Under which name a compiled module has the one that it was made of. Ours with compiled regions use the same.
ORIGINAL = "_orig_mod"

# What torch puts into the names of parameters when it compiles a module, or computes its activations twice.
ADDED_TO_NAMES = (ORIGINAL, "_checkpoint_wrapped_module")


def is_compiled(module: Any) -> bool:
    """Whether a module is what `torch.compile` returned. By the name of the class: importing it takes seconds."""
    for kind in type(module).__mro__:
        if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch."):
            return True
    return False


def original_of(module: Any) -> Any:
    """What a compiled module was made of, and any other module itself.

    Without torch's name for it, it is the only module inside.
    """
    found = getattr(module, ORIGINAL, None)
    if found is None and is_compiled(module):
        found = next(module.children())
    return module if found is None else found


def compiled_like(compiled: Any, module: nn.Module) -> Any:
    """Another module, compiled with the settings of a compiled one; with those that are usual, if torch lost them."""
    settings = getattr(compiled, "dynamo_ctx", None)
    return torch.compile(module) if settings is None else type(compiled)(module, settings)


@functools.cache
def _compiler_module() -> str:
    """The module in `sys.modules` without which nothing has been compiled; torch itself, where it is not known."""
    return "torch._dynamo" if importlib.util.find_spec("torch._dynamo") else "torch"


def _keep_out_of_graphs(function: Any, reason: str) -> None:
    """Mark a function so that the compiler neither compiles it nor looks into it, without loading the compiler.

    Without these names the compiler looks into the function, and loses time, until it meets one that is disabled by
    `torch.compiler.disable`.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
    inside: Any = getattr(getattr(torch, "_C", None), "_dynamo", None)
    frames: Any = getattr(inside, "eval_frame", None)
    if hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)
    elif hasattr(frames, "_FrameExecStrategy") and hasattr(frames, "_FrameAction"):  # from torch 2.8 on
        action = frames._FrameAction
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Let torch.compile run a function as it is, between two graphs.

    `torch.compiler.disable` does this too, and loads the whole compiler (over a second) where nothing is compiled.
    """
    disabled: Callable[..., Any] | None = None
    compiler = _compiler_module()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if compiler not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    _keep_out_of_graphs(call, "hooks run between graphs")
    return call  # type: ignore[return-value]
