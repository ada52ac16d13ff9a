"""torch.distributed.pipelining: what stages hand on to each other."""

from __future__ import annotations

from typing import Any

import torch


def waits_for_every_tensor() -> bool:
    """Whether a stage that is handed several tensors over gloo waits for all of them, and not for the last alone.

    Older releases (2.6, 2.7) let go of the others, and hang. Where torch has another name for it, it is a newer one.
    """
    try:
        from torch.distributed.pipelining.schedules import _batch_p2p
    except ImportError:
        return True
    return _batch_p2p([]) is not None


def greet_in_one_dtype(stage: Any) -> None:
    """Have stages greet each other with as many bytes as the others expect, which those of torch 2.9 do not.

    Over gloo the process dies of it. Where torch has another name for this, the greeting is left as it is.
    """
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is None:
        return

    def in_one_dtype() -> Any:
        found = greetings()
        for greeting in found:
            greeting.tensor = torch.zeros(1, device=greeting.tensor.device)
        return found

    stage._get_init_p2p_neighbors_ops = in_one_dtype
