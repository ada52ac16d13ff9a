"""Packing many small tensors of one dtype into one, and unpacking them.

Each is a single call of torch. If the tensors have one shape, as the fields of samples do, the call creates nothing
else; otherwise it needs a view for each of them, and holds the GIL while these are created.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from accelerate.torch_internals.tensors import clone_all, copy_all_, split_like

# From so many tensors of at most so many bytes on, they travel together.
MANY = 16
SMALL = 1 << 16
_shape, _nbytes = attrgetter("shape"), attrgetter("nbytes")
_kind = attrgetter("dtype", "shape")


class Pack:
    """Small tensors of one dtype that are sent as one, and become separate tensors again on arrival.

    tensors: contiguous, with elements. sizes: of each, in bytes. alike: whether they are rows of one tensor.
    """

    def __init__(self, tensors: list[torch.Tensor], sizes: list[int], alike: bool) -> None:
        self.tensors = tensors
        self.sizes = sizes
        self.alike = alike
        self.dtype: torch.dtype = tensors[0].dtype
        self.nbytes: int = sum(sizes)
        self.numel: int = self.nbytes // self.dtype.itemsize

    def packed(self) -> torch.Tensor:
        packed = torch.empty(self.numel, dtype=self.dtype)
        pack_(packed, self.tensors, self.alike)
        return packed

    def memory(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=device)

    def unpacked(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that arrived, each with its own storage.

        Views of one storage would surprise a script that keeps one of them, resizes it, or writes to it before a
        backward.
        """
        if self.alike:
            return clone_all(packed.view(len(self.tensors), *self.tensors[0].shape).unbind())
        return clone_all(split_like(packed, self.tensors))


def packs_of(tensors: list[torch.Tensor], small: int) -> list[tuple[Pack, list[int]]]:
    """The packs that can be made of these tensors, and the indices of their tensors.

    small: so many bytes at most.
    """
    if len(tensors) < MANY:
        return []
    # The usual ones, without a look at each of them in Python.
    if len(set(map(_kind, tensors))) == 1 and all(map(torch.Tensor.is_contiguous, tensors)):
        size = tensors[0].nbytes
        if not 0 < size <= small:
            return []
        return [(Pack(tensors, [size] * len(tensors), tensors[0].dim() > 0), list(range(len(tensors))))]
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if 0 < tensor.nbytes <= small and tensor.is_contiguous():
            places.setdefault(tensor.dtype, []).append(place)
    return [(_pack([tensors[place] for place in found]), found) for found in places.values() if len(found) >= MANY]


def _pack(tensors: list[torch.Tensor]) -> Pack:
    return Pack(tensors, list(map(_nbytes, tensors)), _alike(tensors))


def pack_(packed: torch.Tensor, tensors: list[torch.Tensor], alike: bool | None = None) -> None:
    """Concatenate these tensors into a flat tensor of exactly their size.

    alike: whether they are rows of one tensor, where that is known.
    """
    if _alike(tensors) if alike is None else alike:
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
    """Whether they could be rows of one tensor, by their shapes and memory order."""
    first = tensors[0]
    return (
        first.dim() > 0
        and first.numel() > 0
        and len(set(map(_shape, tensors))) == 1
        and all(map(torch.Tensor.is_contiguous, tensors))
    )
