"""torch.distributed: the store of the default group, and all groups there are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any | None:
    """The store through which the processes of the default group have met; None where torch does not give it.

    Without it nobody finds out which processes call a save (all are taken to), nor which machine a run has lost.
    """
    get: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def all_groups() -> list[Any]:
    """The process groups there are; the default one alone, where torch does not list them."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    groups = getattr(world, "pg_map", None)
    return [dist.group.WORLD] if groups is None else list(groups)
