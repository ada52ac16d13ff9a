"""Learning the order in which blocks are used: what comes next is what came next the last time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# A step that turned out differently is not counted on again before it was right this many times.
_RIGHT_AGAIN = 2
# How many uses to remember before those that are behind are forgotten.
_KEEP = 4096


class _End:
    """Stands in the log for the end of a forward."""


END = _End()


class Order(Generic[T]):
    """Remembers uses in order, and predicts the next ones.

    A cursor points just behind the last use of the current block in the log. While the uses follow the log it moves on
    by one, so that a block that is used exactly ten times in a row is predicted as exactly that. Otherwise it jumps to
    the last use of the block that came instead.
    """

    def __init__(self) -> None:
        # As if a forward had just ended, so that the second one's first block is foreseen too.
        self._log: list[T | _End] = [END]
        self._forgotten = 0  # how many entries were cut off the front; places count from the very first
        self._last_place: dict[T | _End, int] = {END: 0}
        self._finger = 1
        self._before: T | _End = END
        self._doubts: dict[T | _End, int] = {}

    def use(self, block: T | _End) -> bool:
        """Record a use (or the END of a forward). Returns whether it was predicted."""
        foreseen = self._entry(self._finger)
        hit = foreseen == block
        if hit:
            self._finger += 1
            if self._before in self._doubts:
                self._doubts[self._before] -= 1
                if self._doubts[self._before] == 0:
                    del self._doubts[self._before]
        else:
            if foreseen is not None:
                self._doubts[self._before] = _RIGHT_AGAIN
            self._finger = self._last_place.get(block, self._end()) + 1
        self._last_place[block] = self._end()
        self._log.append(block)
        self._before = block
        self._forget()
        return hit

    def ahead(self) -> Iterator[T]:
        """The next uses, as far as they can be predicted, up to the end of the forward."""
        before, log, doubts = self._before, self._log, self._doubts
        for place in range(max(self._finger - self._forgotten, 0), len(log)):
            entry = log[place]
            if entry is END or (doubts and before in doubts):
                return
            yield entry  # type: ignore[misc]
            before = entry

    def _end(self) -> int:
        return self._forgotten + len(self._log)

    def _entry(self, place: int) -> T | _End | None:
        index = place - self._forgotten
        return self._log[index] if 0 <= index < len(self._log) else None

    def _forget(self) -> None:
        """Drop the log before the cursor, which only ever jumps to last uses further on."""
        behind = self._finger - self._forgotten
        if behind > _KEEP:
            del self._log[:behind]
            self._forgotten += behind
