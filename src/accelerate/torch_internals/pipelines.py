"""torch.distributed.pipelining: what stages hand on to each other."""

from __future__ import annotations


def waits_for_every_tensor() -> bool:
    """Whether a stage that is handed several tensors over gloo waits for all of them, and not for the last alone.

    Before torch 2.9 it lets go of the others, and hangs. Where torch has another name for this it is taken to be newer.
    """
    try:
        from torch.distributed.pipelining.schedules import _batch_p2p
    except ImportError:
        return True
    return _batch_p2p([]) is not None
