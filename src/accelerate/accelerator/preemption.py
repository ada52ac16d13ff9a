"""Stopping in good order: all ranks at the same step, with a checkpoint, and the next run goes on from there."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accelerate.accelerator.base import AcceleratorBase
from accelerate.accelerator.save import Saving
from accelerate.config.preemption import ELASTIC, NOTE, PREEMPTED, REGROUPING, STOP_SIGNALS, regrouping


class Preempting(Saving):
    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM or SIGUSR1 has reached any rank: True on every rank from the same step on.

        Check it once per step, on all ranks, where a checkpoint can be saved. From the first time on, these signals no
        longer end the process by themselves. No collective is needed for it.

        Example:
            ```python
            for batch in loader:
                ...
                if accelerator.should_stop:
                    accelerator.save_state()
                    break
            ```
        """
        return self._stopping.now()

    @property
    def stop_reason(self) -> str | None:
        """Which signal came to which rank, once the ranks have agreed to stop."""
        stop = self._stopping.stop if "_stopping" in vars(self) else None  # nobody listens before somebody asks
        return None if stop is None or not stop.step else stop.reason

    def resume(self) -> bool:
        """Load the newest complete checkpoint of the project, if the launch asks for it with `--resume auto`.

        Call it on all ranks, when everything is prepared and registered. Without `--resume auto` (or the variable
        ACCELERATE_RESUME=auto), and in a project without a checkpoint, nothing happens.

        Returns:
            Whether a checkpoint was loaded.

        Raises:
            CheckpointError: none of the checkpoints of the project is complete.
        """
        self._resume_is_due = False
        if self._resume is None:
            return False
        from accelerate.checkpoint import layout

        there = [bool(self.is_main_process and layout.automatic_folders(Path(self.project_dir)))]
        self._communicator.broadcast_objects(there)
        if there[0]:
            self.load_state()
        if self.is_main_process:
            none = f"there is no checkpoint in {self.project_dir} yet, so this run starts from the beginning"
            said = f"this run continues from {self._loaded_from}" if there[0] else none
            print(f"--resume auto: {said}.", file=sys.stderr, flush=True)
        return there[0]


class SaveAndEnd:
    """Called between two batches of a training loop: saves the run and ends it, when the ranks have agreed to stop."""

    def __init__(self, accelerator: AcceleratorBase) -> None:
        self._accelerator = weakref.ref(accelerator)
        atexit.unregister(end_workers_at_exit)  # once
        atexit.register(end_workers_at_exit)
        self._stopping = accelerator._stopping

    def __call__(self, begins: bool = False) -> None:
        """begins: a loop that may be a training is about to begin, so that from now on there is something to save."""
        if begins:
            self._stopping.begin()
            return
        if not self._stopping.now() or (accelerator := self._accelerator()) is None:
            return
        folder = accelerator.save_state()  # type: ignore[attr-defined]
        reason = self._stopping.stop.reason if self._stopping.stop is not None else ""
        regroups, elastic = reason == REGROUPING, os.environ.get(ELASTIC)
        if accelerator.is_main_process:
            then = (
                "continues from there on the machines that are left or have joined."
                if regroups or elastic
                else f"ends with code {PREEMPTED}. It continues from there when it is started with `accelerate "
                "launch --resume auto` and the script calls `accelerator.resume()`."
            )
            print(f"\n{reason}: the run was saved to {folder} and {then}", file=sys.stderr, flush=True)
        accelerator._tell_trackers("preempted", "preempted, and saved")  # type: ignore[attr-defined]
        if regroups:
            _wait_for_launcher()
        # An elastic run goes on without the machine that got the signal.
        elif self._stopping.was_asked if elastic else accelerator.is_local_main_process:
            _tell_launcher()
        raise SystemExit(PREEMPTED)


def _tell_launcher() -> None:
    """The run was saved and ends: so the launcher is not to start it again."""
    launcher, _, note = os.environ.get(NOTE, "").partition(":")
    if launcher:
        Path(note).touch()
        with suppress(OSError):
            os.kill(int(launcher), signal.SIGTERM)


def _wait_for_launcher() -> None:
    """The launcher of another machine may have seen first that the machines change: an end before this one has would
    be a failure to it."""
    mark, patience = regrouping(), time.monotonic() + 10
    while mark is not None and not mark.exists() and time.monotonic() < patience:
        time.sleep(0.05)


class OutlivesSignals:
    """In place of a `worker_init_fn`: clusters signal all processes of a job, and batches of workers are still needed.

    They end with their loader, or with the process that they work for.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        for name in STOP_SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if self._inner is not None:
            self._inner(worker)


def end_workers_at_exit() -> None:
    """Python ends the workers that are left by SIGTERM, and waits for them: this comes before it."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
