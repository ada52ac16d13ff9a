"""DataLoader: what torch does to a batch and in a worker, and has no public function for."""

from __future__ import annotations

from typing import Any


def pin_memory(batch: Any) -> Any:
    """A batch in page-locked memory, as a loader with `pin_memory` makes it; as it is, without torch's function."""
    try:
        from torch.utils.data._utils.pin_memory import pin_memory as pinned
    except ImportError:
        return batch
    return pinned(batch)


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
