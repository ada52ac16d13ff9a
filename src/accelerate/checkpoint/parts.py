"""The parts of a checkpoint: each is one rank's file, or its share of a folder that all ranks write together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry
from accelerate.io.disk import threads
from accelerate.io.host_memory import HostMemory
from accelerate.io.stored_tensors import write_safetensors
from accelerate.io.torch_format import naming, write_torch


class Part(Protocol):
    """One rank's file, or its share of a folder that all ranks write together."""

    def copied(self, memory: HostMemory) -> Part:
        """A copy in host memory that training does not touch, for a save in the background."""

    def write(self, folder: Path, group: Any) -> dict[str, FileEntry]:
        """Write it into the folder and flush it. Returns an entry for each file that this rank has written.

        group: the process group for communication between ranks; None for that of the training.
        """


@dataclass
class File:
    """One file, written by one rank. name: its path in the checkpoint."""

    name: str
    content: Any
    safe: bool = False
    # Of an optimizer: many small tensors (see `write_torch`, `together`).
    pools_small_tensors: bool = False

    def copied(self, memory: HostMemory) -> File:
        with naming(self.name):
            return replace(self, content=memory.copy(self.content))

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
        path = folder / self.name
        if "/" in self.name:
            disk.make_folder(path.parent)
        if self.safe:
            return {self.name: write_safetensors(self.content, path)}
        return {self.name: write_torch(self.content, path, together=self.pools_small_tensors)}


def write_parts(parts: Iterable[Part], folder: Path, group: Any = None) -> dict[str, FileEntry]:
    """Write parts: files in parallel, since a file system allows one writer per file; other parts in order."""
    entries: dict[str, FileEntry] = {}
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


def copied(parts: Iterable[Part], memory: HostMemory) -> list[Part]:
    """Copies of the parts in host memory that training does not touch."""
    with memory.one_save():
        return [part.copied(memory) for part in parts]
