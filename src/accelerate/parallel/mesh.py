"""Who is where on the device mesh of a run."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accelerate.torch_internals.mesh import join_axes

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig

# The axes along which processes work on the same batch.
SAME_DATA = ("cp", "sp", "tp")


def sharding_mesh(config: ParallelismConfig | None, mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """What FSDP shards over: one axis, or copies and shards."""
    if config is None or mesh is None:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    copies = ["dp_replicate"] if config.dp_replicate_enabled else []
    shards = config.dp_shard_cp_dim_names
    if not shards:
        raise ValueError(f"FSDP has no axis to shard over in {config!r}: give dp_shard_size of 2 or more.")
    if len(shards) == 1:
        return mesh[tuple(copies + shards)]
    if not copies:
        return join_axes(mesh[tuple(shards)], "dp_shard_cp")
    with warnings.catch_warnings():
        # torch would have flattened axes kept aside; an axis beside a flattened one can only be had in this way.
        warnings.simplefilter("ignore")
        return mesh["dp_replicate", "dp_shard_cp"]


def machines_mesh(device: torch.device, local_size: int) -> DeviceMesh | None:
    """Copies of the model on each machine, shared by its processes; None where machines are not equal."""
    processes = dist.get_world_size()
    if processes % local_size:
        return None
    sizes = (processes // local_size, local_size)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))


def shares_of_ranks(mesh: DeviceMesh | None, processes: int) -> list[int]:
    """The part of the data that each process gets: those along the axes of `SAME_DATA` get the same."""
    shares = list(range(processes))
    if mesh is None or mesh.mesh_dim_names is None:
        return shares
    ranks = mesh.mesh
    same = [dim for dim, axis in enumerate(mesh.mesh_dim_names) if axis in SAME_DATA]
    different = [dim for dim in range(ranks.ndim) if dim not in same]
    groups = ranks.permute(*different, *same).reshape(-1, math.prod(ranks.shape[dim] for dim in same))
    for share, group in enumerate(groups.tolist()):
        for rank in group:
            shares[rank] = share
    return shares


def axis_rank(mesh: DeviceMesh | None, *axes: str) -> int:
    """The place of this process along one axis, or along several of them taken together; 0 where there is none."""
    present = [] if mesh is None or mesh.mesh_dim_names is None else [a for a in mesh.mesh_dim_names if a in axes]
    rank = 0
    for axis in present:
        assert mesh is not None
        rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank
