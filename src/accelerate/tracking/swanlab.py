"""SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import LibraryTracker, on_main_process, plain


class SwanLabTracker(LibraryTracker):
    """Logs to the project `run_name`. kwargs: for `swanlab.init`."""

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    package = install = "swanlab"
    finish_in_background = False  # it puts signal handlers back, which only the main thread may

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @classmethod
    def runs_on_every_process(cls) -> bool:
        return False  # one run for all processes, unless a subclass wants more

    @on_main_process
    def start(self) -> None:
        self.run = self.library().init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value: anything `swanlab.log` takes."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value: a list or batch of images. kwargs: for `swanlab.log`."""
        make = self.library().Image
        for key, images in values.items():
            self.log({key: [make(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
