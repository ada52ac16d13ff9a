"""The parts that a rank writes into a checkpoint, what is read back, and rollback if a load fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.checkpoint.reader import CheckpointReader
from accelerate.io import blocks
from accelerate.io.blocks import FileEntry, threads
from accelerate.io.host_memory import HostMemory, is_plain
from accelerate.io.safetensors_format import write_safetensors
from accelerate.io.torch_format import naming, write_torch
from accelerate.torch_internals.modules import (
    buffers_of,
    has_post_load_hooks,
    has_pre_load_hooks,
    loads_by_code_of,
    parameters_of,
)
from accelerate.unwrap import unwrapped_optimizer


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
    """One file, written by one rank."""

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
    """A file in a subfolder of the checkpoint, which is part of its name."""

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
        (folder / self.name).parent.mkdir(parents=True, exist_ok=True)
        return super().write(folder, group)


def _nothing(undo: ExitStack) -> None: ...


@dataclass
class StagedLoad:
    """State that was read for models and optimizers, and not applied yet.

    apply_fallible: called first, for objects that load by code of their own, which may fail. It registers with `undo`
    what restores their present state. apply_in_place: everything else, once nothing has failed on any rank.
    """

    apply_in_place: Callable[[], None]
    apply_fallible: Callable[[ExitStack], None] = _nothing


class StateIO(Protocol):
    """How models and optimizers are saved and loaded: what a checkpoint needs of a `Strategy`."""

    can_roll_back: bool

    def save(self, run: Any, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterable[Part]:
        """The parts of models, optimizers and gradients that this rank writes."""

    def load(self, run: Any, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        """Read and check all of it. Returns what applies it to the run."""


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


def snapshot(parts: Iterable[Part], memory: HostMemory) -> list[Part]:
    """Copies of the parts in host memory that training does not touch."""
    with memory.one_save():
        return [part.copied(memory) for part in parts]


def overrides_load(model: nn.Module) -> bool:
    """Whether a model overrides `load_state_dict`."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model)


def loads_by_own_code(model: nn.Module, names_fit: bool = True, except_for: Callable[..., Any] | None = None) -> bool:
    """Whether a model runs code of its own when it loads, which may change the state or fail.

    Hooks (but `except_for`), extra state and overridden methods are such code. names_fit: if the names in a checkpoint
    are those of the model, the code of torch's own modules does not count: it only translates older names.
    """
    own = nn.Module.set_extra_state
    return overrides_load(model) or any(
        has_post_load_hooks(part)
        or has_pre_load_hooks(part, except_for)
        or type(part).set_extra_state is not own
        or not _loads_as_torch(loads_by_code_of(part), names_fit)
        for part in model.modules()
    )


def _loads_as_torch(code: str, names_fit: bool) -> bool:
    return code == nn.Module.__module__ or (names_fit and code.startswith("torch.nn.modules."))


def snapshot_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` restore the present state of an object."""
    with suppress(Exception):  # one that cannot say now what its state is has none to go back to
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def snapshot_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` restore the groups and states of an optimizer: loading replaces them and changes no tensor."""
    inner = unwrapped_optimizer(optimizer)
    for values in (*inner.param_groups, *inner.state.values()):
        undo.callback(values.update, dict(values))
    for part in (optimizer, inner):
        undo.callback(part.__dict__.update, dict(part.__dict__))


def snapshot_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` restore the parameters and buffers of a model, from a copy of their values in host memory."""
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
    """A view of a tensor without the dimensions that `like` has from `expand`: each memory location once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
