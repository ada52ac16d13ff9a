"""The project's own file: one SQLite file for all its runs, which `accelerate runs` shows."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from accelerate import __version__
from accelerate.errors import a_kind_of, warn
from accelerate.per_rank import PerRank
from accelerate.runs import store
from accelerate.state import PartialState
from accelerate.torch_internals.process_groups import default_store
from accelerate.tracking import overheard
from accelerate.tracking.base import GeneralTracker, settings_of
from accelerate.tracking.outbox import end_of_copies, own_copy
from accelerate.tracking.recorder import Identity, Recorder
from accelerate.tracking.system import Gauges

# Numbers the runs that this rank begins: the ranks tell theirs apart by it.
_numbers: PerRank[Iterator[int]] = PerRank(itertools.count)


class LocalTracker(GeneralTracker):
    """Write to `runs.sqlite` in a folder, which `accelerate runs` reads.

    Rank 0 writes values, settings and checkpoints; every rank writes its step times, warnings and system metrics.

    Args:
        run_name: the name of the project.
        logging_dir: the folder.
        name: the name of this run. By default that of the project.
    """

    name = "local"
    requires_logging_directory = True
    in_background = False  # `log` only puts values into a queue

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], name: str | None = None) -> None:
        super().__init__()
        self.run_name: str = run_name if name is None else name
        if not isinstance(self.run_name, str):  # else it would be said at the end, by the thread that writes
            raise TypeError(f"The name of a run is {a_kind_of(self.run_name)}: pass a str, as `project_name`.")
        self.path: Path = store.place(logging_dir)

    @classmethod
    def runs_on_every_process(cls) -> bool:
        return True

    def start(self) -> None:
        state = PartialState()
        self._first = state.is_main_process
        self._said_trouble = self._said_left_out = False
        if self._first:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise NotADirectoryError(
                    f"The tracker {self.name!r} keeps runs in a folder, and {self.path.parent} is, or is in, a file: "
                    "name another one as `project_dir`, or as `logging_dir` of the ProjectConfiguration."
                ) from None
        self._recorder = Recorder(self.path, _identity(self.run_name, state, next(_numbers.get())), _gauges(state))
        self._recorder.start()
        overheard.listen(self._recorder)

    @property
    def tracker(self) -> Recorder:
        return self._recorder

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self._first:
            self._recorder.configure(own_copy(settings_of(values)))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as curves, including those in nested dicts, and text with its time.

        Args:
            values: the values by name.
            step: the training step.
            **kwargs: not used.
        """
        if not self._first:
            return
        own = {}
        copied = False
        for name, value in values.items():
            kind = type(value)
            if kind is torch.Tensor and value.numel() == 1 and value.device.type == "cpu":
                value = value.item()
            elif kind is not float and kind is not int:
                value = own_copy(value)
                copied = True
            own[name] = value
        self._recorder.log(own, step, end_of_copies(values) if copied else None)
        self._say_trouble()

    def finish(self) -> None:
        overheard.stop(self._recorder)
        written = self._recorder.end("ended")
        self._recorder.close()
        if self._first:
            locked = f"{self.path} is locked by another program, so the end of the run is not in it."
            self._say_trouble(None if written else locked)

    def _after_step(self) -> Callable[[], None]:
        return self._recorder.step

    def _note(self, kind: str, text: str) -> None:
        if kind == "preempted":
            self._recorder.end("ended", text)
        elif self._first:
            self._recorder.event(kind, text)

    def _say_trouble(self, trouble: str | None = None) -> None:
        """Say, once in a run, what was left out, and raise what the thread that writes has met with.

        What a tracker raises becomes a warning.
        """
        if self._recorder.left_out is not None and not self._said_left_out:
            self._said_left_out = True
            warn(
                f"The tracker {self.name!r} keeps numbers and texts, and was given {self._recorder.left_out}, which is "
                "left out: log each number under a name of its own."
            )
        trouble = self._recorder.trouble or trouble
        if trouble is not None and not self._said_trouble:
            self._said_trouble = True
            raise OSError(trouble)


def _identity(name: str, state: PartialState, number: int) -> Identity:
    who = Identity(name, state.process_index, state.num_processes)
    shared = default_store("accelerate/runs") if who.world_size > 1 else None
    mark = f"{state._attempt()}/{number}"
    who.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if who.rank != 0:
        who.find = functools.partial(_find, shared, mark)
        return who
    who.launch = f"{_launcher()}/{number}"
    who.facts = _facts(state)
    if shared is not None:
        who.publish = functools.partial(shared.set, mark)
    if who.attempt == 0:
        who.key = os.urandom(16).hex()
        who.publish(who.key)
    return who


def _launcher() -> str:
    """What all attempts of one launch have in common."""
    named = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    # Without a name: the one launcher is the parent of each attempt.
    return f"{socket.gethostname()}/{os.getppid()}/{store.began(os.getppid())}" if named == "none" else named


def _find(shared: Any, mark: str) -> str | None:
    # Asked, and not waited for: the training talks through the same connection.
    if shared is None or not shared.check([mark]):
        return None
    return str(shared.get(mark).decode())


def _facts(state: PartialState) -> dict[str, Any]:
    return {
        "command": " ".join(sys.argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "processes": state.num_processes,
        "device": str(state.device.type),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "accelerate": __version__,
    }


def _gauges(state: PartialState) -> Gauges:
    device = state.device
    if device.type == "cpu":
        return Gauges(state.is_local_main_process, None, None)
    index = device.index or 0
    memory = functools.partial(state.device_kind.memory, index)
    properties = getattr(state.device_kind.module, "get_device_properties", None)
    identity = None if properties is None else getattr(properties(index), "uuid", None)
    return Gauges(state.is_local_main_process, memory, None if identity is None else f"GPU-{identity}")
