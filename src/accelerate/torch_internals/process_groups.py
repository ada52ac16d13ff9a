"""torch.distributed: the store of the default group, and all groups there are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store(prefix: str = "") -> Any | None:
    """The store through which the processes of the default group have met; None without a group, or if torch does not
    give it. prefix: of all keys, to keep them apart from those of others.

    Without it nobody finds out which processes call a save (all are taken to), nor which machine a run has lost.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    get: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else dist.PrefixStore(prefix, get())


def all_groups() -> list[Any]:
    """The process groups there are; the default one alone, where torch does not list them."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    groups = getattr(world, "pg_map", None)
    return [dist.group.WORLD] if groups is None else list(groups)
