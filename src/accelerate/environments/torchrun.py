"""torchrun, torch elastic, `accelerate launch`, and anything else that speaks their variables."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.environments.base import DEFAULT_PORT, World, integer


def detect(environ: Mapping[str, str]) -> World | None:
    rank = integer(environ, ["RANK"])
    size = integer(environ, ["WORLD_SIZE"])
    if rank is None or size is None:
        return None
    local_size = integer(environ, ["LOCAL_WORLD_SIZE"], size)
    assert local_size is not None
    local_rank = integer(environ, ["LOCAL_RANK"], rank % max(local_size, 1))
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK is {rank} but WORLD_SIZE is {size}: ranks count from 0 to WORLD_SIZE - 1, correct what starts them."
        )
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank or 0,
        local_size=local_size,
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=integer(environ, ["MASTER_PORT"], DEFAULT_PORT) or DEFAULT_PORT,
        started_by="torchrun",
        reason=f"RANK={rank} and WORLD_SIZE={size} are set",
    )
