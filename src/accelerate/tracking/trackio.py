"""Trackio."""

from __future__ import annotations

from accelerate.tracking.project import ProjectTracker


class TrackioTracker(ProjectTracker):
    """Log to Trackio.

    Args:
        run_name: the name of the project.
        **kwargs: arguments for `trackio.init`.
    """

    name = "trackio"
    package = install = "trackio"
