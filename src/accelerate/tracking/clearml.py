"""ClearML."""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking.base import LibraryTracker, on_main_process, one_by_one, only_numbers


class ClearMLTracker(LibraryTracker):
    """Log to the ClearML task that is open, or to a new one.

    Args:
        run_name: the name of the project and the task, unless `CLEARML_PROJECT` and `CLEARML_TASK` are set.
        **kwargs: arguments for `Task.init`, which take precedence.
    """

    name = "clearml"
    requires_logging_directory = False
    package = install = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self._found_open = False

    @on_main_process
    def start(self) -> None:
        kind = self.library().Task
        self.task: Any = kind.current_task()
        self._found_open = self.task is not None
        if not self._found_open:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.user_provided_run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.user_provided_run_name),
            }
            self.task = kind.init(**{**names, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers: single values without a step, points of a curve with one.

        A name that begins with `eval_`, `test_` or `train_` is a curve of that kind in the same plot.

        Args:
            values: the numbers by name.
            step: the training step.
            **kwargs: arguments for the logger's method.
        """
        logger = self.task.get_logger()

        def report(key: str, number: int | float) -> None:
            if step is None:
                logger.report_single_value(name=key, value=number, **kwargs)
            else:
                title, series = _plot(key)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)

        only_numbers(values, report)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: an image by name.
            step: the training step.
            **kwargs: arguments for `Logger.report_image`.
        """
        logger = self.task.get_logger()

        def report(key: str, image: Any) -> None:
            title, series = _plot(key)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

        one_by_one(values, report)

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
            **kwargs: arguments for `Logger.report_table`.
        """
        if data is None and dataframe is None:
            raise ValueError(f"the table {table_name!r} has neither `data` nor `dataframe`: pass one of them")
        rows = [columns, *data] if columns and data is not None else data
        title, series = _plot(table_name)
        shown = rows if dataframe is None else dataframe
        self.task.get_logger().report_table(title=title, series=series, table_plot=shown, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.task is not None and not self._found_open:
            self.task.close()


def _plot(name: str) -> tuple[str, str]:
    """The plot and the curve in it that a value belongs to."""
    kind, _, rest = name.partition("_")
    return (rest, kind) if kind in ("eval", "test", "train") and rest else (name, "train")
