"""State that each rank has for itself: one for the process, or one for each thread where ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_ranks_are_threads = False


def ranks_are_threads(yes: bool = True) -> None:
    """Say that the ranks of this process are its threads, as some devices run them: before any state is made."""
    global _ranks_are_threads
    _ranks_are_threads = yes


def are_ranks_threads() -> bool:
    return _ranks_are_threads


class PerRank(Generic[T]):
    """A value of this rank, made when it is first asked for.

    thread_local: always one for each thread; by default only where `ranks_are_threads`.
    """

    def __init__(self, make: Callable[[], T], thread_local: bool = False) -> None:
        self._make = make
        self._thread_local = thread_local
        self._of_process = make()
        self._of_thread = threading.local()
        _everything.append(self)

    def get(self) -> T:
        if not (_ranks_are_threads or self._thread_local):
            return self._of_process
        try:
            value: T = self._of_thread.value
        except AttributeError:
            value = self._of_thread.value = self._make()
        return value


# Every value there is; they belong to modules and classes, and live as long.
_everything: list[PerRank[Any]] = []


def on_this_rank(function: Callable[[], None]) -> Callable[[], None]:
    """`function` to be run by a helper thread of this rank: it finds the values of the thread that calls here."""
    if not _ranks_are_threads:
        return function
    values = [(item, item.get()) for item in _everything]

    def run() -> None:
        for item, value in values:
            item._of_thread.value = value
        function()

    return run


class ThreadLocalSharedDict:
    """Share one dict between all instances of a class: per process, or per thread.

    Args:
        thread_local: one dict for each thread. By default only if ranks are threads.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: PerRank[dict[str, Any]] = PerRank(dict, thread_local)

    def __get__(self, obj: Any, objtype: type | None = None) -> dict[str, Any]:
        return self._storage.get()

    def __set__(self, obj: Any, value: dict[str, Any]) -> None:
        items = dict(value)  # it may be the very dict
        storage = self._storage.get()
        storage.clear()
        storage.update(items)
