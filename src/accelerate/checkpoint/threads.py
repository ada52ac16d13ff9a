"""Threads for the work of a save or a load, as long as there are any: at the end of a program none can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any


def threads(count: int) -> Executor:
    """So many threads, or where none can be started, this one."""
    pool = ThreadPoolExecutor(count)
    try:
        pool.submit(int)  # it starts the first one
    except RuntimeError:
        return _ThisThread()
    return pool


class _ThisThread(Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def started(thread: threading.Thread) -> bool:
    """Whether a thread could be started."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
