"""Several machines that have yet to meet: now and then one line says for whom this one waits, where and how long."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FIRST_LINE = 10.0
_LOOK = 1.0
# A cluster may know the name of a machine only when that one has started. A shorter limit of the launch counts, too.
_NAMED_WITHIN = 60.0


class NobodyThere(ConnectionError):
    """The machine with rank 0 cannot be found, or does not answer in time."""


def wait_for_main(host: str, port: int, limit: float) -> None:
    """Returns when the machine with rank 0 listens; torch, which would wait as well, says nothing readable."""
    _addresses(host, limit)
    began, due = time.monotonic(), _FIRST_LINE
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            waited, reason = time.monotonic() - began, error.strerror or "no answer"
        if waited > limit:
            raise NobodyThere(
                f"Nothing has answered at {host}:{port} for {waited:.0f} s ({reason}): start the machine with rank 0, "
                "or correct `--main_process_ip` and `--main_process_port`; a firewall may be in between."
            )
        if waited >= due:
            due *= 2
            _say(f"waiting for the machine with rank 0 at {host}:{port}, for {waited:.0f} s so far ({reason}).")
        time.sleep(_LOOK)


def check_own(host: str, limit: float) -> None:
    """On the machine with rank 0, before it listens: whether the others can find it by this address.

    torch, which would look for it as well, says nothing readable.
    """
    if all(_is_elsewhere(*each) for each in _addresses(host, limit)):
        # Not an error: the others may reach this machine by an address that it does not know.
        _say(
            f"{host} is not an address of this machine, which has rank 0 and where the processes meet: correct "
            "`--main_process_ip`, unless it leads here from outside of a container or through NAT."
        )


def _addresses(host: str, limit: float) -> list[Any]:
    """What a name stands for, once that is known."""
    began, most, said = time.monotonic(), min(limit, _NAMED_WITHIN), False
    while True:
        try:
            return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if time.monotonic() - began >= most:
                raise NobodyThere(
                    f"The address {host!r} of the machine with rank 0 cannot be found ({error.strerror}): correct "
                    "`--main_process_ip`, or give an IP address."
                ) from None
            if not said:
                said = True
                _say(f"the address {host!r} cannot be found ({error.strerror}); looking again for {most:.0f} s.")
        time.sleep(_LOOK)


def _is_elsewhere(family: int, kind: int, protocol: int, name: str, address: Any) -> bool:
    """Whether an address is certainly none of this machine's."""
    try:
        with socket.socket(family, kind, protocol) as candidate:
            candidate.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


@contextmanager
def saying_who_is_awaited(host: str, port: int, others: int) -> Iterator[None]:
    """On the machine with rank 0, until the others are there and this one starts its processes."""
    over = threading.Event()
    thread = threading.Thread(target=_say_until, args=(over, host, port, others), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say_until(over: threading.Event, host: str, port: int, others: int) -> None:
    began, due = time.monotonic(), _FIRST_LINE
    while not over.wait(_LOOK) and not _has_children():
        waited = time.monotonic() - began
        if waited >= due:
            due *= 2
            machines = "one more machine" if others == 1 else f"{others} more machines"
            _say(f"waiting for {machines} to join at {host}:{port}, for {waited:.0f} s so far.")


def _has_children() -> bool:
    """Whether this process has started others; taken for true where the system does not tell."""
    try:
        return any(path.read_text() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"))
    except OSError:
        return True


def _say(text: str) -> None:
    print(f"accelerate launch: {text}", file=sys.stderr, flush=True)
