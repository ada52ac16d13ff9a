"""Forgetting the package's shared state."""

from __future__ import annotations

import sys


def reset_state() -> None:
    """Make the next state object a new one; nothing to do if nobody has imported the package's state."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        state.PartialState._reset_state()
