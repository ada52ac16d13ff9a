"""Comet."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import LibraryTracker, as_number, on_main_process, one_by_one


class CometMLTracker(LibraryTracker):
    """Log to Comet.

    Args:
        run_name: the name of the project.
        **kwargs: arguments for `comet_ml.start`.
    """

    name = "comet_ml"
    requires_logging_directory = False
    package = install = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        self.writer: Any = self.library().start(**{"project_name": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and dicts of numbers as metrics, and anything else as a note.

        Args:
            values: the values by name.
            step: the training step.
            **kwargs: arguments for the experiment's method.
        """

        def add(key: str, value: Any) -> None:
            if isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.log_metric(key, number, step=step, **kwargs)
            else:
                self.writer.log_other(key, value, **kwargs)

        if step is not None:
            self.writer.set_step(step)  # also for text, and for what a script sends to the experiment itself
        one_by_one(values, add)

    @on_main_process
    def finish(self) -> None:
        self.writer.end()
