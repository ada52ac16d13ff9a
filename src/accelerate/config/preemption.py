"""What a run does when its machines are taken away, and whether it continues an earlier one."""

from __future__ import annotations

import os
from pathlib import Path

from accelerate.config.project import ProjectConfiguration

# What a rank ends with that was saved because of a signal: "try again" to batch systems (EX_TEMPFAIL).
PREEMPTED = 75
# What asks a run to stop.
STOP_SIGNALS = ("SIGTERM", "SIGUSR1")
# Names a file of the launcher, which is sent the same signal: there it reads that the run was saved.
NOTE = "ACCELERATE_PREEMPTION_NOTE"
# Set where a run goes on without the machines that are taken from it.
ELASTIC = "ACCELERATE_ELASTIC"
# Why ranks stop that their launcher starts again with those of another machine.
REGROUPING = "The machines of the run change"


def regrouping() -> Path | None:
    """A file beside the note, which is there while the launcher has the ranks end to start them again."""
    _, _, note = os.environ.get(NOTE, "").partition(":")
    return Path(note).with_name("regrouping") if note else None


def preemption_settings(asked: str | None, project: ProjectConfiguration) -> tuple[str | None, str | None]:
    """What to do at preemption, by the script or else by the launch; and what the launch says about resuming."""
    preemption = asked if asked is not None else os.environ.get("ACCELERATE_PREEMPTION") or None
    resume = os.environ.get("ACCELERATE_RESUME") or None
    by_launch = "`--preemption` (the variable ACCELERATE_PREEMPTION)"
    _check("`preemption`" if asked is not None else by_launch, preemption, "save", project)
    _check("`--resume` (the variable ACCELERATE_RESUME)", resume, "auto", project)
    return preemption, resume


def _check(name: str, value: str | None, only: str, project: ProjectConfiguration) -> None:
    if value is None:
        return
    if value != only:
        raise ValueError(f"{name} is {value!r}: choose {only!r}, or leave it out.")
    if project.project_dir is None or not project.automatic_checkpoint_naming:
        raise ValueError(
            f"{name} is {value!r} and needs a folder for checkpoints: pass "
            "`project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)` to the Accelerator."
        )
