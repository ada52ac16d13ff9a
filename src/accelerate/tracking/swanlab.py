"""SwanLab."""

from __future__ import annotations

import atexit
import signal
import threading
from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker


class SwanLabTracker(ProjectTracker):
    """Log to SwanLab.

    Args:
        run_name: the name of the project.
        **kwargs: arguments for `swanlab.init`.
    """

    name = "swanlab"
    package = install = "swanlab"

    @on_main_process
    def start(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        super().start()
        self._its_own = signal.getsignal(signal.SIGINT)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: a list or batch of images by name.
            step: the training step.
            **kwargs: arguments for `swanlab.log`.
        """
        make = self.library().Image
        for key, images in values.items():
            self.log({key: [make(image) for image in images]}, step=step, **kwargs)

    def _release(self) -> None:
        # SwanLab answers Ctrl+C itself while a run goes on, and its `finish` puts back the handler from before. Only
        # the main thread may do that: done here, and `finish` is told that it is on another one.
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and self._before is not None and signal.getsignal(signal.SIGINT) == self._its_own:
            signal.signal(signal.SIGINT, self._before)
        self.run._is_main_thread = False
        # Or the exit of the program would wait for the server, however long that takes.
        atexit.unregister(self.run._handle_atexit)
