"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker


class WandBTracker(ProjectTracker):
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

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: rows, or a dataframe.

        Args:
            table_name: the name of the table.
            columns: the names of the columns.
            data: the rows.
            dataframe: a dataframe, instead of rows.
            step: the training step.
            **kwargs: arguments for `wandb.log`.
        """
        table = self.library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)
