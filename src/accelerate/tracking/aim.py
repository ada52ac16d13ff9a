"""Aim: a local repository of runs."""

from __future__ import annotations

import os
from typing import Any

from accelerate.available import is_aim_available
from accelerate.tracking.base import LibraryTracker, as_number, on_main_process, one_by_one


class AimTracker(LibraryTracker):
    """Log to a run of a local Aim repository.

    Args:
        run_name: the name of the run.
        logging_dir: the folder of the repository.
        **kwargs: arguments for `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True
    package = "aim"
    install = "'aim<4'"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs

    @classmethod
    def is_installed(cls) -> bool:
        return is_aim_available()  # not version 4, which is another program

    @on_main_process
    def start(self) -> None:
        repo = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        self.writer: Any = self.library().Run(**{"repo": repo, **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: the values by name: anything that `Run.track` takes.
            step: the training step.
            **kwargs: arguments for `Run.track`.
        """

        def track(key: str, value: Any) -> None:
            number = as_number(value)
            self.writer.track(value if number is None else number, name=key, step=step, **kwargs)

        one_by_one(values, track)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images.

        Args:
            values: an image, or a pair of an image and its caption, by name.
            step: the training step.
            kwargs: arguments for `aim.Image` under "aim_image", and for `Run.track` under "track".
        """
        make = self.library().Image
        options = kwargs or {}

        def track(key: str, value: Any) -> None:
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = make(image, **{"caption": caption, **options.get("aim_image", {})})
            self.writer.track(shown, name=key, step=step, **options.get("track", {}))

        one_by_one(values, track)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
