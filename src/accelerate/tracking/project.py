"""What Weights & Biases, SwanLab and Trackio have in common: a run of a project, with a configuration and a log."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import LibraryTracker, on_main_process, plain


class ProjectTracker(LibraryTracker):
    """Log to a run of a project.

    Args:
        run_name: the name of the project.
        **kwargs: arguments for the library's `init`.
    """

    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @classmethod
    def runs_on_every_process(cls) -> bool:
        return False  # one run for all processes, unless a subclass wants more

    @on_main_process
    def start(self) -> None:
        self.run: Any = self.library().init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: the values by name: anything that the library's `log` takes.
            step: the training step.
            **kwargs: arguments for the library's `log`.
        """
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
