"""Reporting: what a run tells a person, and its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.accelerator.base import AcceleratorBase
from accelerate.config.handlers import ProfileKwargs
from accelerate.constants import PROFILE_PATTERN_NAME
from accelerate.errors import a_kind_of, warn

if TYPE_CHECKING:
    from accelerate.step_timer import StepTimer
    from accelerate.tracking import GeneralTracker
    from accelerate.tracking.running import RunningTrackers


class Reporting(AcceleratorBase):
    # --- trackers -----------------------------------------------------------------------------------------------

    @cached_property
    def _running(self) -> RunningTrackers:
        from accelerate.tracking.running import RunningTrackers

        return RunningTrackers()

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`, on the main process or on every rank, as each tracker asks for.

        Args:
            project_name: the project, run or experiment to log to.
            config: settings of the run, which the trackers store: a dict, a dataclass, or what argparse returns.
            init_kwargs: more arguments for the library of a tracker, by the name of the tracker.

        Raises:
            Exception: whatever a tracker raises when it starts; training has not begun yet.
        """
        from accelerate.tracking import GeneralTracker, known_trackers
        from accelerate.tracking.base import check_attributes, settings_of

        if isinstance(project_name, Mapping):  # else a tracker fails with it, and perhaps at the end of the run only
            raise TypeError(
                f"project_name is {a_kind_of(project_name)}: pass a name, and the settings of the run as `config`."
            )
        if any(not isinstance(asked, GeneralTracker) for asked in self.log_with):  # one of your own may take anything
            config = settings_of(config)
        self._running.say_misspelt("init_kwargs", init_kwargs)
        self._logs_are_lost = False
        self._running.forget_ended()
        if not self.log_with and not self._trackers_are_missing and self.is_main_process:
            warn(
                "`init_trackers` starts no tracker, so nothing that is logged is kept: name one when the Accelerator "
                'is made, as in `Accelerator(log_with="local", project_dir="project")`.'
            )
        starting: list[GeneralTracker] = []
        for asked in self.log_with:
            kind: Any = type(asked) if isinstance(asked, GeneralTracker) else known_trackers()[str(asked)]
            everywhere = kind.runs_on_every_process()
            if isinstance(asked, GeneralTracker) and "main_process_only" in vars(asked):
                everywhere = not asked.main_process_only
            if not self.is_main_process and not everywhere:
                continue
            if isinstance(asked, GeneralTracker):
                if not any(asked is tracker for tracker in (*self._running.all, *starting)):
                    starting.append(asked)
            else:
                folder = (self.logging_dir,) if kind.requires_logging_directory else ()
                starting.append(kind(project_name, *folder, **(init_kwargs or {}).get(str(asked), {})))
                check_attributes(starting[-1])
        for tracker in starting:
            tracker.start()
            self._running.add(tracker)
            if (after_step := tracker._after_step()) is not None:
                self._step_listeners.append(after_step)
                for optimizer in self._optimizers[:1]:
                    optimizer.after_step += (after_step,)
            if config is not None:
                self._running.store(tracker, config)
        self._tell_of_load()

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers started on this process. Values logged before have reached those that are not slow."""
        self._running.in_order(self._running.all)
        return self._running.all

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._logs_are_lost = False
        self._running.all = trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name.

        Args:
            name: the name, such as "tensorboard".
            unwrap: return the object of the tracker's library instead, for what `log` does not offer.

        Returns:
            The tracker. On ranks where it was not started, a tracker that does nothing; on the main process, a warning
            says so.
        """
        from accelerate.tracking import GeneralTracker

        for tracker in self._running.all:
            if tracker.name == name:
                self._running.in_order([tracker])
                return getattr(tracker, "tracker") if unwrap else tracker  # noqa: B009  (each subclass has its own)
        asked = [item.name if isinstance(item, GeneralTracker) else str(item) for item in self.log_with]
        if self._running.all and name not in asked:
            raise ValueError(f"This Accelerator has no tracker {name!r}: it has {', '.join(map(repr, asked))}.")
        self._warn_if_not_started("get_tracker", "the tracker it returns does nothing")
        return GeneralTracker(_blank=True)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Send values to every tracker. A tracker that fails or is slow does not stop training.

        Args:
            values: numbers, strings, tensors with one element, and whatever else the trackers accept.
            step: the training step.
            log_kwargs: more arguments for the `log` of a tracker, by the name of the tracker.
        """
        self._send("log", log_kwargs, values, step=step)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Send images to every tracker that can show them.

        Args:
            values: by name, what the `log_images` of the tracker takes, usually a batch or a list of images.
            step: the training step.
            log_kwargs: more arguments for the `log_images` of a tracker, by the name of the tracker.
        """
        self._send("log_images", log_kwargs, values, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Send a table to every tracker that can show tables, as columns and rows or as a dataframe.

        Args:
            table_name: the name of the table.
            columns: the names of the columns.
            data: the rows.
            dataframe: a dataframe, in place of `columns` and `data`.
            step: the training step.
            log_kwargs: more arguments for the `log_table` of a tracker, by the name of the tracker.
        """
        table = {"columns": columns, "data": data, "dataframe": dataframe}
        self._send("log_table", log_kwargs, table_name, **table, step=step)

    def _send(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        self._warn_if_not_started(method, "its values are lost")
        self._running.send(method, *args, **kwargs)

    def _warn_if_not_started(self, method: str, so: str) -> None:
        """Warn, the first time, that the script has asked for trackers and not started them."""
        if self._logs_are_lost:
            self._logs_are_lost = False
            warn(
                f"`{method}` was called before the trackers of `log_with` were started, so {so}: call "
                "`accelerator.init_trackers(project_name)` first."
            )

    def _tell_of_load(self) -> None:
        """Which checkpoint the run comes from: to trackers that listened when it was loaded, or to the first since."""
        if self._untold_load is not None and "_running" in vars(self) and self._running.all:
            self._tell_trackers("loaded", str(self._untold_load.absolute()))
            self._untold_load = None

    def _tell_trackers(self, kind: str, text: str) -> None:
        """Tell them what happened to the run: a checkpoint was "saved" or "loaded", whose folder is the text, or it was
        "preempted"."""
        if "_running" in vars(self):  # without trackers nobody listens
            self._running.note(kind, text)

    def end_training(self) -> None:
        """End training: trackers write their remaining values and end, and the process group is destroyed.

        Trackers get 300 seconds for it, or those of `ACCELERATE_TRACKER_TIMEOUT`; one that takes longer is named in a
        warning and left behind.
        """
        try:
            if self._stops_at_nonfinite is not None:
                self._stops_at_nonfinite.look_at_last()
            self._running.end()
        finally:
            self._step_listeners.clear()
            self.state.destroy_process_group()

    # --- profiles and times -------------------------------------------------------------------------------------

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Run the block under torch's profiler.

        Args:
            profile_handler: settings of the profiler. By default those among the `kwargs_handlers`, or torch's own.
                With `output_trace_dir`, each rank writes `profile_<rank>.json`, which a browser's tracing page opens.

        Yields:
            The profiler. With a schedule, call its `step()` after each training step.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        if profiler.profiler is None:  # an error in torch, at the end of a training that went well
            warn("The profile has no trace: nothing was recorded, because the loop ended before its schedule began.")
        else:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(os.fspath(folder / PROFILE_PATTERN_NAME.format(suffix=self.process_index)))
        self.wait_for_everyone()

    def step_timer(self, warmup: int = 1) -> StepTimer:
        """Measure where the time of training steps goes, on every rank.

        Use it as a context around the training loop, after `prepare`. When the block ends, on all ranks together, the
        main process prints a table and the trackers get the numbers.

        Args:
            warmup: how many steps at the beginning to leave out.

        Returns:
            The context manager.
        """
        from accelerate.step_timer import StepTimer

        return StepTimer(self, warmup=warmup)
