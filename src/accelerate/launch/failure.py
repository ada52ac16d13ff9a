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


def say(rank: Any, host: Any, traceback: str, also: str = "") -> None:
    """The traceback as the last thing on the screen, under the name of its rank."""
    _last(f"Rank {rank} on {host} was the first to fail{also}", traceback)


def say_of_several(ranks: list[int], host: Any, traceback: str, also: str = "", *, shown: bool) -> None:
    """The same of all that failed alike. shown: whether the traceback is on the screen already, for all of them."""
    who = f"Ranks {', '.join(map(str, sorted(ranks)))} on {host} failed alike{also}"
    if shown:
        lines = traceback.rstrip().splitlines()
        # The error itself: what comes after the lines of the stack, which are indented.
        stack = max((number for number, line in enumerate(lines) if line.startswith(" ")), default=-1)
        _last(f"{who}, as shown above", "\n".join(lines[stack + 1 :]) or traceback)
    else:
        _last(who, traceback)


def _last(who: str, text: str) -> None:
    sys.stdout.flush()
    print(f"\n{who}:\n{text.rstrip()}", file=sys.stderr, flush=True)
