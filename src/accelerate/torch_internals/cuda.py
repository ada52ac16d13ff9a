"""torch.cuda: the moment in which it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def when_started(call: Callable[[], None]) -> None:
    """Have a function called from inside the call that starts CUDA.

    Without torch's list of such calls it never is: a notebook is not told which of its lines has started CUDA.
    """
    later: Any = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(call)
