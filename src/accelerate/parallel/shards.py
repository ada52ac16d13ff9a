"""Tensors that are spread over a device mesh: the piece here, the whole, and a norm over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accelerate.torch_internals.mesh import local_shape_and_offset
from accelerate.torch_internals.tensors import multiply_, norms


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; writing to it changes the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. To be called by all processes of its mesh."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def piece_of(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The piece of a whole tensor that this process holds where it is spread as `like` is; a view."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = local_shape_and_offset(full.shape, like.device_mesh, like.placements)
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), size)
    return full


def spread_as(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which every process has, spread as `like` is."""
    if not isinstance(like, DTensor):
        return full
    full = full.contiguous()
    piece = piece_of(full, like).to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        piece, like.device_mesh, like.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this process is the first of those that hold the same piece."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    copies = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 or not placement.is_replicate() for position, placement in copies)


def complete(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient whose pieces are not waiting to be added up."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
        return gradient.redistribute(placements=placements)
    return gradient


def total_norm(
    tensors: Iterable[torch.Tensor],
    norm_type: float,
    device: torch.device,
    counts: Callable[[torch.Tensor], bool],
) -> torch.Tensor:
    """The norm of all these tensors together, as if they were whole. To be called by all processes.

    counts: whether the piece on this process is the one that is counted, of those that are the same.
    """
    own = [piece for tensor in tensors if counts(tensor) and (piece := local(tensor)).numel()]
    own_norms = _norms(own, norm_type, device)
    if norm_type == float("inf"):
        total = own_norms.max() if own_norms.numel() else torch.zeros((), device=device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = own_norms.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


def _norms(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros(0, device=device)
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return torch.stack([norm.to(device) for group in groups.values() for norm in norms(group, norm_type)])


def scale_down(tensors: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Multiply all tensors with what makes a norm of `total` one of at most `max_norm`."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in map(local, tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), group in groups.items():
        multiply_(group, factor.to(device))
