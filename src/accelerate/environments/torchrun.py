"""torchrun, torch elastic, `accelerate launch`, and anything else that speaks their variables."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.environments.base import DEFAULT_PORT, World, integer


def attempt(environ: Mapping[str, str]) -> str:
    """What tells the notes of this world from those of earlier ones in the same store.

    Machines of one launch need not count alike: one of them may have been started again. They do where torch elastic
    keeps the store from one attempt to the next; else the store is new with each attempt.
    """
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"


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
            f"RANK is {rank} but WORLD_SIZE is {size}: ranks are counted from 0 to WORLD_SIZE - 1; correct the "
            "command that starts them."
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
