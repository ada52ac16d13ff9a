"""Trackio."""

from __future__ import annotations

from accelerate.tracking.project import ProjectTracker


class TrackioTracker(ProjectTracker):
    """Logs to the project `run_name`. kwargs: for `trackio.init`."""

    name = "trackio"
    package = install = "trackio"
