"""Waiting for the other processes."""

from __future__ import annotations

from accelerate.state import PartialState


def wait_for_everyone() -> None:
    """Wait until every rank has called this."""
    PartialState().wait_for_everyone()
