"""torch.distributed.pipelining: what stages hand on to each other."""

from __future__ import annotations


def waits_for_every_tensor() -> bool:
    """Whether a stage that is handed several tensors over gloo waits for all of them, and not for the last alone.

    Older releases (2.6, 2.7) let go of the others, and hang. Where torch has another name for it, it is a newer one.
    """
    try:
        from torch.distributed.pipelining.schedules import _batch_p2p
    except ImportError:
        return True
    return _batch_p2p([]) is not None
