"""State that is one and the same for all instances of a class."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class ThreadLocalSharedDict(threading.local):
    """A class attribute that hands out one dict to all instances: per thread, or (the default) per process.

    Devices that run their ranks as threads of one process need the former.
    """

    _process_wide: weakref.WeakKeyDictionary[ThreadLocalSharedDict, dict[str, Any]] = weakref.WeakKeyDictionary()

    def __init__(self, thread_local: bool = False) -> None:
        if thread_local:
            self._storage: dict[str, Any] = {}
        else:
            # __init__ of a threading.local runs again in each thread: all of them find the same dict here.
            self._storage = self._process_wide.setdefault(self, {})

    def __get__(self, obj: Any, objtype: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, obj: Any, value: dict[str, Any]) -> None:
        items = dict(value)  # it may be the very dict
        self._storage.clear()
        self._storage.update(items)
