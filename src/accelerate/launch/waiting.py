"""Several machines that have yet to meet: now and then one line says for whom this one waits, where and how long."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_LINE = 10.0
_LOOK = 1.0


class NobodyThere(ConnectionError):
    """The machine with rank 0 cannot be found, or does not answer in time."""


def wait_for_main(host: str, port: int, limit: float) -> None:
    """Returns when the machine with rank 0 listens; torch, which would wait as well, says nothing readable."""
    began, due = time.monotonic(), _FIRST_LINE
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except socket.gaierror as error:
            raise NobodyThere(
                f"The address {host!r} of the machine with rank 0 cannot be found ({error.strerror}): correct "
                "`--main_process_ip`, or give an IP address."
            ) from None
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
