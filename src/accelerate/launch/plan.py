"""What a launch will do, as data: it can be printed and tested without starting anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.launch.settings import Settings

# Runs modules of this package: one of the working folder, such as a `queue.py`, is not meant. Python 3.10 looks there;
# and so does a later one where this package itself is in that folder, and perhaps not installed.
_IS_HERE = Path(__file__).parents[2] == Path.cwd()
OWN_PYTHON = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) and not _IS_HERE else [])]


@dataclass(frozen=True)
class LaunchPlan:
    """A command, and the variables to set for it.

    engine: who runs the processes, in words.
    becomes: the command may take the place of this process (it looks after its own children).
    each: what every one of the processes runs, where the command itself starts several.
    machines: by their names, what starts the processes of other machines, where the command does that.
    gathers: failures are written down by the workers and told again at the end.
    carries: the variables go to other machines, in a file that DeepSpeed's launcher reads.
    missing: what this machine lacks to carry the plan out, as a sentence.
    refused: what is not part of this version, and what to do instead; such a plan can only be shown.
    """

    engine: str
    argv: list[str]
    env: dict[str, str]
    each: list[str] = field(default_factory=list)
    machines: dict[str, list[str]] = field(default_factory=dict)
    becomes: bool = False
    gathers: bool = False
    carries: bool = False
    missing: str = ""
    refused: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LaunchEngine:
    """Something that runs processes: when it is the one, and its plan."""

    matches: Callable[[Settings], bool]
    plan: Callable[[Settings], LaunchPlan]


def plan(settings: Settings) -> LaunchPlan:
    """The plan of the first engine that is meant."""
    from accelerate.launch.engines import ENGINES

    engine = next(engine for engine in ENGINES if engine.matches(settings))
    return engine.plan(settings)
