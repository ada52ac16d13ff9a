"""What one process writes into a checkpoint, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from accelerate.checkpoint.reader import CheckpointReader
from accelerate.io import blocks
from accelerate.io.blocks import FileEntry, threads
from accelerate.io.host_memory import HostMemory, is_plain
from accelerate.io.safetensors_format import write_safetensors
from accelerate.io.torch_format import naming, write_torch
from accelerate.torch_internals.modules import buffers_of, parameters_of
from accelerate.unwrap import unwrapped_optimizer


class Part(Protocol):
    """A file of one process, or its share of a folder that all processes write together."""

    def copied(self, memory: HostMemory) -> Part:
        """The same in host memory that training does not touch, for a save behind the training."""

    def write(self, folder: Path, group: Any) -> dict[str, FileEntry]:
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

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
        path = folder / self.name
        if self.safe:
            return {self.name: write_safetensors(self.content, path)}
        return {self.name: write_torch(self.content, path, together=self.together)}


@dataclass
class FileInFolder(File):
    """A file in a folder of the checkpoint, as its name says."""

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
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


def write_parts(parts: Iterable[Part], folder: Path, group: Any = None) -> dict[str, FileEntry]:
    """Write parts: files side by side, since a file system lets one writer into each; others in their order."""
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


def snapshot(parts: Iterable[Part], memory: HostMemory) -> list[Part]:
    """The parts as they are now, in memory that training does not touch."""
    with memory.one_save():
        return [part.copied(memory) for part in parts]


def snapshot_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` give an object the state that it has now."""
    with suppress(Exception):  # one that cannot say now what its state is has none to go back to
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def snapshot_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` give an optimizer its present groups and states: to load makes new ones, and leaves tensors alone."""
    inner = unwrapped_optimizer(optimizer)
    for values in (*inner.param_groups, *inner.state.values()):
        undo.callback(values.update, dict(values))
    for part in (optimizer, inner):
        undo.callback(part.__dict__.update, dict(part.__dict__))


def snapshot_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` give a model its present parameters and buffers, with their values, of which the host gets a copy."""
    tables: list[MutableMapping[str, Any]] = [
        table for part in model.modules() for table in (parameters_of(part), buffers_of(part))
    ]
    before = [dict(table) for table in tables]
    tensors = {id(own): own for names in before for own in names.values() if _has_value(own)}
    values = HostMemory().copy(tensors)

    def put_back() -> None:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names.keys():
                del table[name]
            for name, own in names.items():
                table[name] = own
        for key, own in tensors.items():
            with torch.no_grad(), suppress(RuntimeError):  # what cannot be written to is as it was
                target = own.detach()
                if is_plain(target):
                    dense_view(target, own).copy_(dense_view(values[key], own))
                else:
                    target.copy_(values[key])

    undo.callback(put_back)


def _has_value(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not is_lazy(tensor) and not tensor.is_meta


def dense_view(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that one made with `expand`, as `like` is, has room for: each place in its memory once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
