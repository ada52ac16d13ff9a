"""Where a project keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass
class ProjectConfiguration:
    """Folders of a project and how its checkpoints are named and pruned."""

    project_dir: str | os.PathLike[str] | None = field(
        default=None, metadata={"help": "Where checkpoints and, unless said otherwise, logs go."}
    )
    logging_dir: str | os.PathLike[str] | None = field(
        default=None, metadata={"help": "Where trackers write; by default `project_dir`."}
    )
    automatic_checkpoint_naming: bool = field(
        default=False,
        metadata={"help": "Name checkpoints `checkpoints/checkpoint_<n>` inside `project_dir`."},
    )
    total_limit: int | None = field(
        default=None, metadata={"help": "Keep at most this many automatically named checkpoints."}
    )
    iteration: int = field(default=0, metadata={"help": "The number of the next checkpoint."})
    save_on_each_node: bool = field(
        default=False, metadata={"help": "Write files on every machine, for when they share no file system."}
    )

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project folder, and the logging folder if it has none yet.

        Args:
            project_dir: the project folder.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
