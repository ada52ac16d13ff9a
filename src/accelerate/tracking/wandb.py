"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker
from accelerate.tracking.table import ShowsTables, Table


class WandBTracker(ShowsTables, ProjectTracker):
    """Log to Weights & Biases.

    Args:
        run_name: the name of the project.
        **kwargs: arguments for `wandb.init`.
    """

    name = "wandb"
    package = install = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: a list or batch of images by name.
            step: the training step.
            **kwargs: arguments for `wandb.log`.
        """
        make = self.library().Image
        for key, images in values.items():
            self.log({key: [make(image) for image in images]}, step=step, **kwargs)

    def _log_table(self, table: Table, step: int | None, **kwargs: Any) -> None:
        shown = self.library().Table(columns=table.columns, data=table.data, dataframe=table.dataframe)
        self.log({table.name: shown}, step=step, **kwargs)
