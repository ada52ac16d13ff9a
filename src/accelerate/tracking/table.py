"""Tables: what `log_table` takes, for every tracker that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.tracking.base import GeneralTracker, on_main_process


@dataclass
class Table:
    """A named table: rows (`data`) with or without the names of their columns, or a dataframe."""

    name: str
    columns: list[str] | None
    data: Any
    dataframe: Any


class ShowsTables(GeneralTracker):
    """Add `log_table` to a tracker; how its library shows a table is in `_log_table`."""

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
            **kwargs: arguments for the library.
        """
        self._log_table(Table(table_name, columns, data, dataframe), step, **kwargs)

    def _log_table(self, table: Table, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError
