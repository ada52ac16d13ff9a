"""What one process writes into a checkpoint, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from accelerate.checkpoint.reader import CheckpointReader
from accelerate.io import blocks
from accelerate.io.blocks import Entry, threads
from accelerate.io.host_memory import HostMemory
from accelerate.io.safetensors_format import write_safetensors
from accelerate.io.torch_format import naming, write_torch


class Part(Protocol):
    """A file of one process, or its share of a folder that all processes write together."""

    def copied(self, memory: HostMemory) -> Part:
        """The same in host memory that training does not touch, for a save behind the training."""

    def write(self, folder: Path, group: Any) -> dict[str, Entry]:
        """Write it into the folder, flushed; returns an entry for each file that this process has written.

        group: the process group for whatever the processes have to tell each other, None for that of the training.
        """


@dataclass
class File:
    """One file, written by one process."""

    name: str
    content: Any
    safe: bool = False
    # Of an optimizer: many small tensors (see `together`).
    together: bool = False

    def copied(self, memory: HostMemory) -> File:
        with naming(self.name):
            return replace(self, content=memory.copy(self.content))

    def write(self, folder: Path, group: Any = None) -> dict[str, Entry]:
        path = folder / self.name
        if self.safe:
            return {self.name: write_safetensors(self.content, path)}
        return {self.name: write_torch(self.content, path, together=self.together)}


@dataclass
class FileInFolder(File):
    """A file in a folder of the checkpoint, as its name says."""

    def write(self, folder: Path, group: Any = None) -> dict[str, Entry]:
        (folder / self.name).parent.mkdir(parents=True, exist_ok=True)
        return super().write(folder, group)


def _nothing(undo: ExitStack) -> None: ...


@dataclass
class StagedLoad:
    """What was read of models and optimizers, on its way into them.

    apply_fallible: comes first, for those with code of their own, which may object. `undo` gets what makes them again
    as they were. apply_in_place: all else, where nobody has failed.
    """

    apply_in_place: Callable[[], None]
    apply_fallible: Callable[[ExitStack], None] = _nothing


class StateIO(Protocol):
    """How models and optimizers get into a checkpoint and back; see `Strategy`, which is one."""

    can_roll_back: bool

    def save(self, run: Any, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterable[Part]:
        """What this process writes of models, optimizers and gradients."""

    def load(self, run: Any, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        """Read and check all of it; returns what puts it into the run."""


def write_parts(parts: Iterable[Part], folder: Path, group: Any = None) -> dict[str, Entry]:
    """Write parts: files side by side, since a file system lets one writer into each; others in their order."""
    entries: dict[str, Entry] = {}
    with threads(blocks.FILES) as pool:
        files = []
        for part in parts:
            if isinstance(part, File):
                files.append(pool.submit(part.write, folder))
            else:
                entries |= part.write(folder, group)
        for file in files:
            entries |= file.result()
    return entries


def snapshot(parts: Iterable[Part], memory: HostMemory) -> list[Part]:
    """The parts as they are now, in memory that training does not touch."""
    with memory.one_save():
        return [part.copied(memory) for part in parts]
