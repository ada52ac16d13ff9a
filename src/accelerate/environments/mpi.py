"""mpirun and mpiexec: Open MPI, Intel MPI / MPICH (PMI) and MVAPICH2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from accelerate.environments.base import DEFAULT_PORT, World, integer


class Names(NamedTuple):
    rank: str
    size: str
    local_rank: str
    local_size: str


FLAVOURS = {
    "Open MPI": Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH2": Names(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    "PMI": Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect(environ: Mapping[str, str]) -> World | None:
    for flavour, names in FLAVOURS.items():
        rank, size = integer(environ, [names.rank]), integer(environ, [names.size])
        if rank is None or size is None or size < 2:
            continue
        if names.local_size not in environ and "SLURM_STEP_NUM_TASKS" in environ:
            continue  # srun speaks PMI too, and knows the nodes
        local_size = integer(environ, [names.local_size], size) or size
        local_rank = integer(environ, [names.local_rank], rank % local_size) or 0
        address = environ.get("MASTER_ADDR")
        if address is None and local_size != size:
            raise ValueError(
                f"mpirun started {size} processes on several machines, but MASTER_ADDR does not say where rank 0 is: "
                "pass it on, for instance with `mpirun -x MASTER_ADDR=<address of the first machine> ...`."
            )
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            address=address or "127.0.0.1",
            port=integer(environ, ["MASTER_PORT"], DEFAULT_PORT) or DEFAULT_PORT,
            started_by="mpirun",
            reason=f"{flavour} has set {names.rank}={rank} and {names.size}={size}",
        )
    return None
