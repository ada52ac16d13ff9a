"""Many small tensors of one dtype in one piece, and out of it again.

Each is a call of torch for all of them. Where they have one shape, as the fields of samples do, that call makes nothing
else; elsewhere it needs a view for each of them, and Python's lock while these are made and dropped.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from accelerate.torch_internals.tensors import copy_all_, split_like

_shape = attrgetter("shape")


def pack_(packed: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Put the elements of these tensors one behind the other into a flat one, which has room for just them."""
    if _alike(tensors):
        torch.cat(tensors, out=packed.view(-1, *tensors[0].shape[1:]))
    elif full := _not_empty(tensors):
        copy_all_(split_like(packed, full), full)


def unpack_(tensors: list[torch.Tensor], packed: torch.Tensor) -> None:
    """Fill these tensors with what was packed."""
    if _alike(tensors):
        rows, *rest = tensors[0].shape
        torch.split_with_sizes_copy(packed.view(-1, *rest), [rows] * len(tensors), out=tensors)
    elif full := _not_empty(tensors):
        copy_all_(full, split_like(packed, full))


def _not_empty(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """torch 2.6 forgets the shape of those without elements."""
    return [tensor for tensor in tensors if tensor.numel()]


def _alike(tensors: list[torch.Tensor]) -> bool:
    """Whether they are rows of one tensor, as far as their shapes and the order of their elements go."""
    first = tensors[0]
    return (
        first.dim() > 0
        and first.numel() > 0
        and len(set(map(_shape, tensors))) == 1
        and all(map(torch.Tensor.is_contiguous, tensors))
    )
