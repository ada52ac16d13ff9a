"""Device meshes and DTensors: axes joined into one, the piece that is here, and how context parallelism exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from accelerate.torch_internals.missing import gone

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement  # takes a second, which few runs need


def join_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, which the mesh that they are of knows by `name` afterwards.

    There is no public way: without it, axes cannot be joined, and only a single one can be sharded over.
    """
    flatten: Any = getattr(mesh, "_flatten", None)
    if flatten is None:
        raise gone("DeviceMesh._flatten", f"joining the axes of a mesh ({name})", "use FSDP without ParallelismConfig")
    joined: DeviceMesh = flatten(name)
    return joined


def held_piece(tensor: torch.Tensor) -> Any:
    """The very tensor that a DTensor holds as its piece here, not another view of it; None if torch lost the name."""
    return getattr(tensor, "_local_tensor", None)


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of the piece of a tensor that this process holds, and where in the whole it begins.

    Without torch's function it is worked out here, for tensors that are cut along each axis in turn; those that FSDP
    cuts once more inside a tensor axis are refused.
    """
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        return _cut_in_turn(shape, mesh, placements)
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def _cut_in_turn(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Sequence[int], Sequence[int]]:
    from torch.distributed.tensor.placement_types import Replicate, Shard

    sizes, offsets = list(shape), [0] * len(shape)
    coordinate = tuple(mesh.get_coordinate() or ())
    for axis, (rank, placement) in enumerate(zip(coordinate, placements, strict=True)):
        if type(placement) is Shard:
            size = sizes[placement.dim]
            chunk = -(-size // mesh.size(axis))
            start = min(rank * chunk, size)
            sizes[placement.dim] = min(chunk, size - start)
            offsets[placement.dim] += start
        elif type(placement) is not Replicate:
            raise gone(
                "compute_local_shape_and_global_offset",
                f"a tensor that is spread as {placement}",
                "shard over one axis only",
            )
    return sizes, offsets


def set_exchange_of_context(method: str) -> None:
    """How context parallelism exchanges keys and values: "allgather", which is usual, or "alltoall".

    Without torch's function for it, the other one is lost.
    """
    try:
        from torch.distributed.tensor.experimental._attention import set_rotate_method
    except ImportError:
        if method != "allgather":
            raise gone("set_rotate_method", f"cp_comm_strategy={method!r}", "leave it at 'allgather'") from None
        return
    set_rotate_method(method)
