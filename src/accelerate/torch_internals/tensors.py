"""Tensors: many at once, whether one was written to, and the parts of sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_multiply_all: Callable[..., Any] | None = getattr(torch, "_foreach_mul_", None)
_norm_all: Callable[..., Any] | None = getattr(torch, "_foreach_norm", None)


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply tensors of one device in place; one after the other, which is slower, without `torch._foreach_mul_`."""
    if _multiply_all is not None:
        _multiply_all(tensors, factor)
        return
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(factor)


def norms(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor of one device, in fp32; one after the other without `torch._foreach_norm`."""
    if _norm_all is not None:
        return list(_norm_all(tensors, norm_type, dtype=torch.float32))
    return [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32) for tensor in tensors]


def change_mark(tensor: torch.Tensor) -> int | float:
    """A number that changes whenever a tensor is written to.

    Without torch's counter of that it is the sum of the values: slower, and blind to a change that adds up to nothing.
    """
    try:
        return tensor._version
    except AttributeError:
        return float(tensor.detach().to_dense().double().sum())


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The indices and values of a sparse tensor as they are, and whether it is coalesced.

    Without the private methods it is coalesced before: what came twice is added up.
    """
    try:
        return tensor._indices(), tensor._values(), tensor.is_coalesced()
    except AttributeError:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values(), True
