"""Nested data as torch's tracers take it apart: also classes that were registered with torch for that."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from accelerate.torch_internals.missing import gone


def flatten(data: Any) -> tuple[list[Any], Any]:
    """What is inside of nested data, and its structure."""
    leaves, structure = _tree().tree_flatten(data)
    return list(leaves), structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Nested data of a structure that `flatten` gave."""
    return _tree().tree_unflatten(list(leaves), structure)


def _tree() -> ModuleType:
    """Without it the outputs of a model in stages cannot be put together: `prepare_pippy` is lost."""
    try:
        from torch.utils import _pytree
    except ImportError:
        raise gone(
            "torch.utils._pytree",
            "a model in stages on several processes",
            "install a release of torch that accelerate knows",
        ) from None
    return _pytree
