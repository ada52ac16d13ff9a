"""torch.distributed: the store of the default group, all groups there are, and how to abort one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A machine that is busy may take some time to answer.
_CONNECTING = timedelta(seconds=30)


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


def all_gather_on(group: Any | None) -> Callable[[list[torch.Tensor], torch.Tensor], Callable[[], Any]]:
    """What begins to fill one tensor per rank with what that rank has, and returns what waits for it.

    group: None for the default one.

    Straight from the group, since torch's function around it takes half as long as the exchange of a small tensor; it
    is that function where groups have no such method.
    """
    own: Any = dist.group.WORLD if group is None else group
    method: Any = getattr(own, "allgather", None)

    def by_group(outs: list[torch.Tensor], tensor: torch.Tensor) -> Callable[[], Any]:
        wait: Callable[[], Any] = method([outs], [tensor]).wait
        return wait

    def by_torch(outs: list[torch.Tensor], tensor: torch.Tensor) -> Callable[[], Any]:
        work = dist.all_gather(outs, tensor, group=group, async_op=True)
        return _nothing if work is None else work.wait

    return by_torch if method is None else by_group


def _nothing() -> None:
    """What there is to wait for after a collective that is over."""


def collectives_begun() -> int:
    """How many collectives this process has begun, over all its groups; 0 where torch does not count them.

    Without it a rank that makes the same call again and again looks like one that waits in it.
    """
    return sum(map(_begun, all_groups()))


def begun_by_group() -> dict[str, int]:
    """The same of each group, by its name, which all its processes know; nothing where groups have none.

    Without it ranks that have run out of memory at different places try again, and may wait for each other then.
    """
    groups = [(getattr(group, "group_name", None), group) for group in all_groups()]
    return {str(name): _begun(group) for name, group in groups if name is not None}


def _begun(group: Any) -> int:
    count: Any = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return 0 if count is None else int(count())
    except RuntimeError:  # of a group that does not count, or is being taken down
        return 0


def own_connection(timeout: Any) -> Any | None:
    """Another connection to the store of the default group, which nobody else waits on; None where there is none.

    timeout: of everything that is asked of it. Without it nobody watches whether ranks hang.
    """
    store = _bare(default_store())
    if isinstance(store, dist.TCPStore):
        return connection_to(store.host, store.port, timeout)
    path = getattr(store, "path", None)
    return dist.FileStore(path, -1) if isinstance(store, dist.FileStore) and path is not None else None


def connection_to(host: str, port: int, timeout: Any) -> Any:
    """A connection to the store that listens there, which need not be that of a group yet.

    timeout: of everything that is asked of it.

    Raises:
        OSError: nobody listens, as when rank 0 has ended already. torch would show its stack, and go on trying.
    """
    connecting = max(timeout, _CONNECTING)
    socket.create_connection((host, port), connecting.total_seconds()).close()
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=connecting)
    store.set_timeout(timeout)
    return store


def _bare(store: Any) -> Any:
    """The store underneath prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = getattr(store, "underlying_store", None)
    return store


def can_abort() -> bool:
    """Whether torch ends the collectives of a process group on demand.

    Without it a rank that waits on its device for one that ran out of memory cannot be reached, and the run ends.
    """
    return dist.is_available() and hasattr(dist.ProcessGroup, "abort")


def abort(group: Any) -> None:
    """End the collectives of a group on this process, from any thread; where `can_abort`."""
    group.abort()


# The connection, and the store that it is one to.
_kept: tuple[Any, Any] | None = None


def kept_connection(timeout: Any, prefix: str) -> Any | None:
    """`own_connection`, made once for as long as the default group has the same store: for who needs it again. prefix:
    of all keys.

    To take a connection is what costs a store most.
    """
    global _kept
    store = _bare(default_store())
    if _kept is None or _kept[1] is not store:
        _kept = own_connection(timeout), store
    if _kept[0] is None:
        return None
    connection = dist.PrefixStore(prefix, _kept[0])
    connection.set_timeout(timeout)
    return connection
