"""Waiting for the other processes."""

from __future__ import annotations

from accelerate.state import PartialState


def wait_for_everyone() -> None:
    """Returns when every process has called it."""
    PartialState().wait_for_everyone()
