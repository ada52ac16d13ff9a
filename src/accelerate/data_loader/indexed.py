"""Shuffling without a list: the index at any place of the order is computed when it is needed.

Keys that come of seed and epoch turn places into indices, one to one, by a Feistel network: a place is a row and a
column, and in turn each of the two is moved on by a hash of the other. The table has a few cells more than there are
samples; from a cell that is none, it goes on until it comes to one that is.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from accelerate.data_loader.samplers import COUNTED_SAMPLERS, Leaping, SeedableRandomSampler

_ROUNDS = 8
_BLOCK = 1024  # how many indices are computed at a time
_FIRST_BLOCK = 64


class Bijection:
    """The numbers below `length` in an order of their own for each key."""

    def __init__(self, length: int, *key: int) -> None:
        self.length = length
        rows = math.isqrt(max(length - 1, 0)) + 1
        columns = max(-(-length // rows), 1)
        self._sizes = np.uint64(rows), np.uint64(columns)
        keys = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [np.uint64(int.from_bytes(keys[at : at + 8], "little")) for at in range(0, len(keys), 8)]

    def __call__(self, start: int, stop: int) -> Any:
        """The numbers at the places from `start` to before `stop`, as an array."""
        found = self._moved(np.arange(start, stop, dtype=np.uint64))
        while len(outside := np.flatnonzero(found >= self.length)):
            found[outside] = self._moved(found[outside])
        return found.astype(np.int64)

    def _moved(self, cells: Any) -> Any:
        rows, columns = self._sizes
        row, column = cells // columns, cells % columns
        for number, key in enumerate(self._keys):
            if number % 2:
                row = (row + _hashed(column, key) % rows) % rows
            else:
                column = (column + _hashed(row, key) % columns) % columns
        return row * columns + column


def _hashed(values: Any, key: np.uint64) -> Any:
    """Mixes all 64 bits (the finalizer of SplitMix64)."""
    values = values * np.uint64(0x9E3779B97F4A7C15) + key
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class IndexedRandomSampler(SeedableRandomSampler):
    """A random sampler that keeps no list of its order, and can start anywhere in it at once."""

    def __iter__(self) -> Iterator[int]:
        return self.after(0)

    def after(self, count: int) -> Generator[int, None, None]:
        """An iteration without its first `count` indices."""
        epoch = self.epoch
        try:
            yield from self.order(count)
        finally:
            if self.epoch == epoch:  # as in the base class
                self.set_epoch(epoch + 1)

    def order(self, start: int = 0, epoch: int | None = None) -> Iterator[int]:
        """The indices of an epoch (this one) from a place on, for a look at them: it is not an iteration."""
        length = len(self.data_source)
        epoch, stop, block = self.epoch if epoch is None else epoch, self.num_samples, _FIRST_BLOCK
        while start < stop:
            # More samples than there are may be asked for: each turn has an order of its own.
            turn, place = divmod(start, length)
            numbers = Bijection(length, self.initial_seed, epoch, turn)
            end = min(length, place + stop - start)
            while place < end:
                found = numbers(place, min(place + block, end))
                yield from found.tolist()
                place, start, block = place + len(found), start + len(found), _BLOCK


class _Places(Leaping):
    """An iteration of such a sampler."""

    def __init__(self, sampler: IndexedRandomSampler) -> None:
        self._sampler = sampler
        self._epoch: int | None = None
        self._place = 0
        # Its end, or that of this object, is the end of the epoch.
        self._iteration = sampler.after(0)
        self._order: Iterator[int] = self._iteration

    def __next__(self) -> int:
        if self._epoch is None:
            self._epoch = self._sampler.epoch
        found = next(self._order, None)
        if found is None:
            self._iteration.close()
            raise StopIteration
        self._place += 1
        return found

    def leave_out(self, count: int) -> None:
        self._place += count
        if count > _BLOCK:
            self._order = self._sampler.order(self._place, self._epoch)
        else:  # to start again would take longer
            deque(itertools.islice(self._order, count), maxlen=0)


COUNTED_SAMPLERS[IndexedRandomSampler] = _Places
