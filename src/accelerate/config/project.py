"""Where a project keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, SupportsIndex

from accelerate.errors import a_kind_of


@dataclass
class ProjectConfiguration:
    """Folders of a project and how its checkpoints are named and pruned.

    Args:
        project_dir: the folder for checkpoints and, by default, for logs.
        logging_dir: the folder for trackers; by default `project_dir`.
        automatic_checkpoint_naming: name checkpoints `checkpoints/checkpoint_<n>` inside `project_dir`.
        total_limit: keep at most this many automatically named checkpoints, at least 1.
        iteration: the number of the next checkpoint.
        save_on_each_node: write files on every machine, if they do not share a file system.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        _check_limit(self.total_limit)
        _check_folder("logging_dir", self.logging_dir)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project folder, and the logging folder if it has none yet.

        Args:
            project_dir: the project folder.

        Raises:
            TypeError: it is not a path.
        """
        _check_folder("project_dir", project_dir)
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def _check_folder(name: str, folder: Any) -> None:
    if not isinstance(folder, str | os.PathLike | None):
        raise TypeError(
            f"{name} is {folder!r}, {a_kind_of(folder)}: pass a path, as a str or a Path, or None for no folder."
        )


def _check_limit(limit: Any) -> None:
    if limit is None:
        return
    if not isinstance(limit, SupportsIndex):
        raise TypeError(
            f"total_limit is {limit!r}, {a_kind_of(limit)}: pass the number of checkpoints to keep, or None to keep "
            "all."
        )
    if limit.__index__() < 1:
        raise ValueError(
            f"total_limit is {limit}, and the newest checkpoint is always kept: pass 1 to keep only that one, or None "
            "to keep all."
        )
