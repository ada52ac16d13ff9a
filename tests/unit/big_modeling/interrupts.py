"""Ctrl-C while threads are at work."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from accelerate.devices.staging import Stager


class ControlC:
    """Stands in for a function that the threads of a pool call: at one of the calls, somebody presses Ctrl-C.

    From then on no call returns before the main thread has heard of it and waits for the pool to end.
    """

    def __init__(self, function: Callable[..., Any], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self._function = function
        self._at = at
        self._numbers = itertools.count(1)
        self._heard = threading.Event()
        shutdown = ThreadPoolExecutor.shutdown

        def hear(pool: ThreadPoolExecutor, wait: bool = True, **options: Any) -> None:
            if wait:
                self._heard.set()
            shutdown(pool, wait=wait, **options)

        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", hear)
        close = Stager.close

        def hear_too(stager: Stager, *args: Any, **kwargs: Any) -> None:
            self._heard.set()
            close(stager, *args, **kwargs)

        monkeypatch.setattr(Stager, "close", hear_too)

    def __call__(self, *args: Any) -> Any:
        number = next(self._numbers)
        self.calls = max(self.calls, number)
        if number == self._at:
            os.kill(os.getpid(), signal.SIGINT)
        if number >= self._at:
            self._heard.wait(10)  # limited: a signal right before a wait of the main thread is heard after it
        return self._function(*args)
