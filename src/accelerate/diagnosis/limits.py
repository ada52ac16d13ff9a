"""After how long a rank that waits is said to hang, and what happens then: as the environment says."""

from __future__ import annotations

from typing import Any

LIMIT = "ACCELERATE_HANG_TIMEOUT"
ACTION = "ACCELERATE_HANG_TIMEOUT_ACTION"
DEFAULT_LIMIT = 60.0
# What the rank that shows a hang ends with, where that ends the run: as `timeout` ends.
ABORTED = 124


def limit_from(environ: Any) -> float:
    """After how many seconds a rank that waits is said to hang; 0 for never."""
    text = environ.get(LIMIT, "") or str(DEFAULT_LIMIT)
    try:
        limit = float(text)
        if not 0 <= limit < float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"{LIMIT} is {text!r}: give a number of seconds, or 0 to turn it off.") from None
    return limit


def aborts(environ: Any) -> bool:
    """Whether a hang ends the run."""
    action = environ.get(ACTION, "") or "warn"
    if action not in ("warn", "abort"):
        raise ValueError(f"{ACTION} is {action!r}: choose warn or abort.")
    return bool(action == "abort")


def check(environ: Any) -> None:
    """Raises for settings that cannot be read."""
    limit_from(environ)
    aborts(environ)
