"""Several machines that may come and go: where they meet under torch elastic's c10d, and what is said of changes."""

from __future__ import annotations

import copy
import ipaddress
import os
import socket
import sys
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from accelerate.config.preemption import ELASTIC, regrouping

_BACKEND = "accelerate"


def settle(config: Any, node_rank: int) -> bool:
    """Completes what torch elastic is told of a meeting through c10d; returns whether this machine listens there."""
    host, port = config.rdzv_endpoint.rsplit(":", 1)
    if "is_host" in config.rdzv_configs:
        listens = str(config.rdzv_configs["is_host"]).lower() in ("1", "true", "t", "yes", "y")
    else:
        listens = node_rank == 0 and _is_here(host)
        config.rdzv_configs["is_host"] = str(listens)
    # Others may not know this machine by its name.
    config.local_addr = config.local_addr or _own_address(host, int(port))
    # The store that torch elastic would share with the ranks is that of the attempts before, which machines count
    # differently: in torch 2.13 a machine that joins waits there forever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if config.min_nodes < config.max_nodes:
        os.environ[ELASTIC] = "1"
    rendezvous_handler_registry.register(_BACKEND, _Announcing)
    config.rdzv_backend = _BACKEND
    return listens


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's."""
    for family, kind, protocol, _, address in _addresses(host, 0):
        with socket.socket(family, kind, protocol) as candidate:
            try:
                candidate.bind(address)
            except OSError:
                continue
            return True
    return False


def _own_address(host: str, port: int) -> str | None:
    """The address from which this machine reaches another; None where it cannot be told.

    Many machines know their own name as 127.0.1.1, where nobody else finds them.
    """
    for family, kind, protocol, _, address in _addresses(host, port):
        with socket.socket(family, kind, protocol) as way:
            try:
                way.connect(address)  # of a datagram: nothing is sent
            except OSError:
                continue
            own = str(way.getsockname()[0])
            if not _is_loopback(own) or host == "localhost" or _is_loopback(host):
                return own
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:  # a name
        return False


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except OSError:
        return []


class _Announcing(RendezvousHandler):
    """torch elastic's c10d, which says when the machines are others than before, and tells the ranks why they end."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        plain = copy.copy(parameters)
        plain.backend = "c10d"
        self._inner: Any = rendezvous_handler_registry.create_handler(plain)
        self._most = parameters.max_nodes
        self._machines: int | None = None
        mark = regrouping()
        assert mark is not None  # the launcher has named it
        self._mark = mark

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        self._mark.unlink(missing_ok=True)
        before, self._machines = self._machines, info.world_size
        if info.rank == 0 and (info.world_size != before if before else info.world_size < self._most):
            goes = "starts on" if before is None else f"continues, after {before}, on"
            print(
                f"accelerate launch: the run {goes} {info.world_size} of at most {self._most} machines.",
                file=sys.stderr,
                flush=True,
            )
        return info

    def num_nodes_waiting(self) -> int:
        waiting = int(self._inner.num_nodes_waiting())
        if waiting and not self._mark.exists():
            # All ranks are ended now, and started again with those of the other machine: read by those that save first.
            self._mark.touch()
        return waiting

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())
