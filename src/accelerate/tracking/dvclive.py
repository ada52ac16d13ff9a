"""DVCLive."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import LibraryTracker, on_main_process, only_numbers


class DVCLiveTracker(LibraryTracker):
    """Log with DVCLive.

    Args:
        run_name: not used, since DVCLive has no such name.
        live: your `dvclive.Live`. By default a new one.
        **kwargs: arguments for a new `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False
    package = install = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live: Any = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        if self.live is None:
            self.live = self.library().Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text.

        Args:
            values: the values by name.
            step: the training step. By default the next one.
            **kwargs: arguments for `Live.log_metric`.
        """
        if step is not None:
            self.live.step = step
        try:
            only_numbers(values, lambda key, value: self.live.log_metric(key, value, **kwargs), and_text=True)
        finally:
            self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        self.live.end()
