"""The port at which the processes of a run meet: taken by their launcher, and kept until the run has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.machine import is_port_in_use

FLAG = "`--main_process_port` (0 for any free one)"


class PortTaken(ConnectionError):
    """A port that has to be this one cannot be listened on."""


def in_use(port: int, setting: str = FLAG) -> PortTaken:
    """The error for a port where something listens."""
    return PortTaken(
        f"Something on this machine already listens on port {port}, where the processes should meet: "
        f"end it, or give another {setting}."
    )


@contextmanager
def meeting_point(port: int, any_free: bool, setting: str = FLAG) -> Iterator[int]:
    """Listens on a port, or on another one where any free one will do, and gives its number.

    Torch elastic, which is told of it afterwards, shares what listens in its own process (`multi_tenant`). So nobody
    can take the port between the moment it is chosen and the moment it is used.
    """
    from torch.distributed import DistNetworkError, TCPStore

    store = None
    for choice in (port, 0) if any_free else (port,):
        # What an earlier run of this same process has left there would be shared too.
        if choice and is_port_in_use(choice):
            continue
        try:
            store = TCPStore("localhost", choice, is_master=True, wait_for_workers=False, multi_tenant=True)
            break
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise PortTaken(f"The processes cannot meet at port {port} of this machine: {error}") from None
    if store is None:
        raise in_use(port, setting)
    yield int(store.port)
