"""TensorBoard: event files in a folder."""

from __future__ import annotations

import os
import time
from typing import Any

from accelerate.available import is_tensorboard_available
from accelerate.errors import a_kind_of
from accelerate.tracking.base import LibraryTracker, as_number, on_main_process, one_by_one


class TensorBoardTracker(LibraryTracker):
    """Write TensorBoard event files to `logging_dir/run_name`.

    Args:
        run_name: the name of the run.
        logging_dir: the folder.
        **kwargs: arguments for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    package: str = "tensorboard"
    install: str = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir: str = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    @classmethod
    def is_installed(cls) -> bool:
        return is_tensorboard_available()

    @on_main_process
    def start(self) -> None:
        try:
            self.library()
            module = "torch.utils.tensorboard"
        except ImportError:
            self.package = "tensorboardX"  # its older stand-in
            module = self.package
        self.writer: Any = self.library(module).SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as hyperparameters, and in a file `hparams.yml`.

        Args:
            values: the settings.
        """
        import yaml

        simple = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()
        }
        self.writer.add_hparams(simple, metric_dict={})
        self.writer.flush()
        folder = os.path.join(self.logging_dir, str(time.time()))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "hparams.yml"), "w") as file:
            try:
                yaml.safe_dump(values, file)
            except yaml.YAMLError:
                file.seek(0)
                file.truncate()
                yaml.safe_dump(simple, file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, strings as text, and dicts of numbers as several curves in one plot.

        Args:
            values: the values by name.
            step: the training step.
            **kwargs: arguments for the writer's method.
        """

        def add(key: str, value: Any) -> None:
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.add_scalar(key, number, global_step=step, **kwargs)
            else:
                raise TypeError(f"{a_kind_of(value)} is not a number, string or dict")

        try:
            one_by_one(values, add)
        finally:
            self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images.

        Args:
            values: a batch of images by name, as `SummaryWriter.add_images` takes it.
            step: the training step.
            **kwargs: arguments for `SummaryWriter.add_images`, such as `dataformats="NHWC"`.
        """
        one_by_one(values, lambda key, value: self.writer.add_images(key, value, global_step=step, **kwargs))

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
