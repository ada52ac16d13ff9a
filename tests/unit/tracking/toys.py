"""Trackers for tests."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker


class ListTracker(GeneralTracker):
    """Keeps what it was called with, in order."""

    name = "list"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.kwargs = kwargs
        self.seen: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.seen

    def start(self) -> None:
        self.seen.append(("start",))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.seen.append(("finish",))
