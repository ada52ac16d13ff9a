"""SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker


class SwanLabTracker(ProjectTracker):
    """Logs to the project `run_name`. kwargs: for `swanlab.init`."""

    name = "swanlab"
    package = install = "swanlab"
    finish_in_background = False  # it puts signal handlers back, which only the main thread may

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value: a list or batch of images. kwargs: for `swanlab.log`."""
        make = self.library().Image
        for key, images in values.items():
            self.log({key: [make(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
