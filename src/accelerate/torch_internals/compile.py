"""torch.compile: the module that it returns, and the one inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Under which name a compiled module has the one that it was made of. Ours with compiled regions use the same.
ORIGINAL = "_orig_mod"


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
