"""DataLoader: what torch does to a batch and in a worker, and has no public function for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def pin_memory(batch: Any) -> Any:
    """A batch in page-locked memory, as a loader with `pin_memory` makes it; as it is, without torch's function."""
    try:
        from torch.utils.data._utils.pin_memory import pin_memory as pinned
    except ImportError:
        return batch
    return pinned(batch)


def stop_pinning(batches: Any) -> bool:
    """Have an iteration without workers no longer pin what it reads, if it does; returns whether it did.

    Where it cannot be stopped, batches are pinned while the loop waits for them.
    """
    if getattr(batches, "_num_workers", None) != 0 or not getattr(batches, "_pin_memory", False):
        return False
    batches._pin_memory = False
    return True


def before_first_read(batches: Any, function: Callable[[], None]) -> bool:
    """Have a function called once in an iteration without workers: after the sampler has given its next indices, and
    before the dataset is read. Returns whether that is possible.

    For torchdata's loader; torch's own can be given a sampler that does it. Without the private fetcher, a dataset that
    draws from global generators draws other numbers after a resume inside an epoch.
    """
    if not hasattr(getattr(batches, "_dataset_fetcher", None), "fetch"):
        return False
    _FirstRead(batches, function)
    return True


class _FirstRead:
    """In the place of the fetcher, until it is used."""

    def __init__(self, batches: Any, function: Callable[[], None]) -> None:
        self._batches, self._function, self._fetcher = batches, function, batches._dataset_fetcher
        batches._dataset_fetcher = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        self._batches._dataset_fetcher = self._fetcher
        self._function()
        return self._fetcher.fetch(indices)


def renumber(info: Any, worker: int) -> None:
    """Give what `get_worker_info` returned, and which guards itself, another number and the seed that goes with it.

    Where it cannot be changed, a dataset that looks at it sees another number after a resume inside an epoch.
    """
    seed = info.seed - info.id + worker
    with suppress(AttributeError, TypeError):
        object.__setattr__(info, "id", worker)
        object.__setattr__(info, "seed", seed)


def numpy_seed(base: int, worker: int) -> Any:
    """What torch seeds NumPy with in a worker. base: the seed of the iteration.

    Without torch's function it is another one, also of that worker alone: after a resume inside an epoch, a dataset
    that draws from NumPy's global generator in workers draws other numbers than it would have.
    """
    try:
        from torch.utils.data._utils.worker import _generate_state
    except ImportError:
        return (base + worker) % 2**32
    return _generate_state(base, worker)


def is_being_read() -> bool:
    """Whether any loader of torch is being iterated; never, where torch has no such class."""
    try:
        from torch.utils.data.dataloader import _BaseDataLoaderIter as Reading
    except ImportError:
        return False
    # By type: to ask some objects what they are would wake them up.
    return any(issubclass(type(item), Reading) for item in gc.get_objects())
