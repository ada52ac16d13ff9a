"""How a run failed, read from what its workers wrote down (see worker.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

# The folder in which workers write down their failures, where torch elastic does not name a file for each.
FOLDER = "ACCELERATE_FAILURES"


def details(record: Any) -> dict[str, Any]:
    """The part of a record that we wrote; empty where somebody else wrote it."""
    message = record.get("message") if isinstance(record, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def first_in(folder: str) -> dict[str, Any] | None:
    """The earliest failure of a folder."""
    found = []
    for path in Path(folder).glob("*.json"):
        try:
            found.append(details(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            continue  # written by a process that was killed while it wrote
    return min(found, key=lambda record: float(record.get("time", 0)), default=None)


def say(ranks: Collection[Any], host: Any, traceback: str, also: str = "", *, shown: bool = False) -> None:
    """The error as the last thing on the screen, under the name of its rank, or of all ranks that failed alike.

    shown: whether the traceback is on the screen already, for all of them.
    """
    if len(ranks) == 1:
        who = f"Rank {next(iter(ranks))} on {host} was the first to fail{also}"
    else:
        who = f"Ranks {', '.join(map(str, sorted(ranks)))} on {host} failed in the same way{also}"
    text = traceback.rstrip()
    if shown:
        who, text = f"{who}, as shown above", _error_alone(text)
    sys.stdout.flush()
    print(f"\n{who}:\n{text}", file=sys.stderr, flush=True)


def _error_alone(traceback: str) -> str:
    """The error itself: what comes after the lines of the last stack. They are indented, as lines of it may be, too."""
    lines = traceback.splitlines()
    stack = max((number for number, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=-1)
    error = next((number for number in range(stack + 1, len(lines)) if not lines[number].startswith(" ")), 0)
    return "\n".join(lines[error:])
