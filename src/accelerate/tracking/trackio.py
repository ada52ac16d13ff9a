"""Trackio."""

from __future__ import annotations

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker


class TrackioTracker(ProjectTracker):
    """Logs to the project `run_name`. kwargs: for `trackio.init`."""

    name = "trackio"
    package = install = "trackio"

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
