"""How a run failed, read from what its workers wrote down (see worker.py)."""

from __future__ import annotations

import json
import sys
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


def say(rank: Any, host: Any, traceback: str, also: str = "", alike: list[int] | None = None) -> None:
    """The traceback as the last thing on the screen, under the name of its rank, or of all that failed in this way."""
    sys.stdout.flush()
    who = f"Rank {rank} on {host} was the first to fail{also}"
    if alike and len(alike) > 1:
        who = f"Ranks {', '.join(map(str, sorted(alike)))} on {host} failed alike{also}"
    print(f"\n{who}:\n{traceback.rstrip()}", file=sys.stderr, flush=True)
