"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.project import ProjectTracker


class WandBTracker(ProjectTracker):
    """Logs to the project `run_name`. kwargs: for `wandb.init`."""

    name = "wandb"
    package = install = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value: a list or batch of images. kwargs: for `wandb.log`."""
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
        """A table, from `columns` and `data` or from a dataframe."""
        table = self.library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
