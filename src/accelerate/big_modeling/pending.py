"""Modules that wait for a device, in order, and found by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from accelerate.big_modeling.device_map_checks import closest_entry


class Pending:
    """Queue modules that can also be found, removed or replaced by name, at a cost that does not grow with its length.

    No name in it contains another one.
    """

    def __init__(self, entries: Iterable[tuple[str, Any]]) -> None:
        self._parts: dict[str, Any] = {}
        # Who follows whom, both ways; None is before the first and after the last.
        self._next: dict[str | None, str | None] = {None: None}
        self._previous: dict[str | None, str | None] = {None: None}
        self.insert(entries, before=None)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name = self._next[None]
        while name is not None:
            yield name, self._parts[name]
            name = self._next[name]

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def insert(self, entries: Iterable[tuple[str, Any]], before: str | None) -> None:
        """Insert entries before another one, or at the end if that is None."""
        for name, part in entries:
            ahead = self._previous[before]
            self._parts[name] = part
            self._next[ahead], self._previous[name] = name, ahead
            self._next[name], self._previous[before] = before, name

    def push(self, entries: Iterable[tuple[str, Any]]) -> None:
        """Insert entries at the front, in their order."""
        self.insert(entries, before=self._next[None])

    def pop(self) -> tuple[str, Any]:
        """Remove and return the first entry."""
        name = self._next[None]
        if name is None:
            raise IndexError("nothing is pending")
        return name, self.remove(name)

    def remove(self, name: str) -> Any:
        """Remove and return an entry, wherever it is."""
        ahead, behind = self._previous.pop(name), self._next.pop(name)
        self._next[ahead], self._previous[behind] = behind, ahead
        return self._parts.pop(name)

    def replace(self, name: str, entries: Iterable[tuple[str, Any]]) -> None:
        """Replace one entry by others."""
        behind = self._next[name]
        self.remove(name)
        self.insert(entries, before=behind)

    def holder(self, name: str) -> str | None:
        """Return the entry that is or contains a tensor, or None."""
        return closest_entry(name, self._parts)
