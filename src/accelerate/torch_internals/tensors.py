"""Tensors: many at once, whether one was written to, and the parts of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_multiply_all: Callable[..., Any] | None = getattr(torch, "_foreach_mul_", None)
_norm_all: Callable[..., Any] | None = getattr(torch, "_foreach_norm", None)
_unflatten: Callable[..., Any] | None = getattr(getattr(torch, "_utils", None), "_unflatten_dense_tensors", None)
_copy_all: Callable[..., Any] | None = getattr(torch, "_foreach_copy_", None)
_times_all: Callable[..., Any] | None = getattr(torch, "_foreach_mul", None)
# What can be multiplied. Times True, each of them stays what it is.
_NUMBERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NUMBERS |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


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


def copy_all_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors of one device; one after the other, which is slower, without `torch._foreach_copy_`."""
    if _copy_all is not None:
        _copy_all(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one device and dtype, each in memory of its own.

    That memory is taken one by one, which is slower, without `torch._foreach_mul`, and for the few dtypes without
    arithmetic.
    """
    if _times_all is None or tensors[0].dtype not in _NUMBERS:
        return [tensor.clone() for tensor in tensors]
    clones: list[torch.Tensor] = list(_times_all(tensors, True))
    copy_all_(clones, tensors)  # bit by bit: the product of a NaN may be another one
    return clones


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a flat tensor, one behind the other, in the shapes of these tensors; made one by one, which is slower,
    without torch's function for gradients in one piece."""
    if _unflatten is not None:
        views: Sequence[torch.Tensor] = _unflatten(flat, tensors)
        return views
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


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
