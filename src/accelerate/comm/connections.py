"""The connections that a process group over gloo is made of, to be shut down where this process cannot go on.

torch has no call that ends a collective of gloo in which others wait, and a group closes its connections only when
nothing holds it any more, DDP for one. Once they are shut down, the others' collectives fail at once.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_Open = tuple[int, int]  # a descriptor, and what it was opened for: numbers are used again
_of_group: set[_Open] = set()


@contextmanager
def remembered(port: int | None) -> Iterator[None]:
    """Around the beginning of a group.

    port: of the store where the processes meet, whose connections are not meant; None if they cannot be told apart.
    """
    before = _sockets()
    yield
    _of_group.clear()
    if port is not None:
        _of_group.update(each for each in _sockets() - before if _leads_elsewhere(each, port))


def shut_down() -> None:
    """Shut those of the present group down, for this process and for those that it is connected with."""
    for each in _of_group:
        with suppress(OSError), _same(each) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    _of_group.clear()


def known() -> bool:
    """Whether there are any to shut down."""
    return bool(_of_group)


def _sockets() -> set[_Open]:
    found = set()
    with suppress(OSError):  # a system that does not list them
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _same(opened: _Open) -> socket.socket:
    """The socket, to be used and dropped; raises an OSError if it is gone."""
    descriptor, number = opened
    if os.fstat(descriptor).st_ino != number:
        raise OSError(f"{descriptor} is another file now")
    return socket.socket(fileno=os.dup(descriptor))


def _leads_elsewhere(opened: _Open, port: int) -> bool:
    with suppress(OSError), _same(opened) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return port not in (connection.getsockname()[1], connection.getpeername()[1])
    return False
