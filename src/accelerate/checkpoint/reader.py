"""Reading large files straight into their tensors, verifying checksums on the way."""

from __future__ import annotations

import mmap
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from accelerate.devices.staging import bytes_of
from accelerate.errors import CheckpointError
from accelerate.io import blocks, disk, host_memory
from accelerate.io.blocks import FileEntry
from accelerate.io.disk import check_plain
from accelerate.io.read_tensors import read_file
from accelerate.io.safe_load import Opened, explaining, missing, read_torch
from accelerate.io.stored_tensors import FileRange, SafetensorsFile, mapped

CPU = torch.device("cpu")

# Where a tensor of a file goes: to a device, or into a tensor of the run.
Destination = torch.device | torch.Tensor
# By the keys under which it is found in the file.
FindDestination = Callable[[tuple[Any, ...]], Destination]


@dataclass
class CheckpointReader:
    """Reads the files of one checkpoint.

    Data for an existing tensor of the run is read twice: to verify checksums, and by `fill` once all of the checkpoint
    is known to be good. Data for new tensors, which nobody sees until then, is read once.

    unchecked: the manifest entries of files whose checksums have not been verified; reading a file removes its entry.
    share: (index, count) of the processes that read the same files at once; each verifies its share.
    names: the files and folders of the checkpoint; None if everything in its folder belongs to it.
    """

    folder: Path
    unchecked: dict[str, FileEntry] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)
    names: frozenset[str] | None = None
    # Tensors of the run, by the address of their memory, with what they take and the file that it is in.
    _later: dict[int, tuple[torch.Tensor, torch.Tensor, Path]] = field(default_factory=dict)
    # What the files were when they were mapped.
    _about: dict[Path, os.stat_result] = field(default_factory=dict)

    def know(self, files: Iterable[str]) -> None:
        """Tell the reader which files the checkpoint has."""
        names = frozenset(files)
        folders = {PurePosixPath(name).parent for name in names}
        self.names = names | {way.as_posix() for folder in folders for way in (folder, *folder.parents)}

    def has(self, name: str) -> bool:
        """Whether there is a file, or a folder, of that name in the checkpoint."""
        if self.names is None:
            return (self.folder / name).exists()
        return name in self.names

    def path(self, name: str) -> Path:
        """The path of a file of the checkpoint. Raises if it has none of that name."""
        if not self.has(name):
            if self.names is not None and not (self.folder / name).exists():  # a manifest says what was saved
                raise CheckpointError(
                    f"{self.folder} has no {name}, because fewer objects were saved than are prepared here: prepare "
                    "only the saved ones before the load, and the others after it."
                )
            raise missing(self.folder / name)
        return self.folder / name

    def weights(self, name: str, places: Mapping[str, Destination]) -> dict[str, Any]:
        """The weights in a file. places: the destination of each, by name."""
        if name.endswith(".safetensors"):
            return self._safetensors(name, places)
        found: dict[str, Any] = self.content(name, lambda keys: places.get(keys[0], CPU))
        return found

    def content(self, name: str, place: FindDestination = lambda keys: CPU) -> Any:
        """The content of a `torch.save` file. place: gives the destination of each large tensor."""
        path = self.path(name)
        with explaining(path):
            check_plain(path)
        if not zipfile.is_zipfile(path):
            return read_torch(path)  # as torch did before 1.6; it is compared later on
        with explaining(path):
            opened = Opened(path)
        mapped = self._mapped(path)
        places = dict(opened.places)
        found = _users(opened.content, places)
        for address, users in found.items():
            if address in opened.together:
                continue
            offset, memory = places[address]
            targets = {place(keys) for _, keys, _ in users}
            whole = all(t.is_contiguous() and t.nbytes == len(memory) for _, _, t in users)
            if not whole or targets == {CPU} or len(targets) > 1 or len({_kind(t) for _, _, t in users}) > 1:
                continue
            stored, target = users[0][2], targets.pop()
            if isinstance(target, torch.Tensor):
                if not self._takes(target, stored, mapped[offset : offset + len(memory)], path):
                    continue
                moved = target
                del places[address]
            else:
                moved = torch.empty_like(stored, device=target)
                places[address] = (offset, bytes_of(moved))
            for holder, keys, _ in users:
                holder[keys[-1]] = moved
        self._read(name, list(places.values()), mapped)
        for address in opened.together:
            for holder, keys, tensor in found.get(address, ()):
                if isinstance(holder, (dict, list)):
                    holder[keys[-1]] = tensor.clone()
        return opened.content

    def _safetensors(self, name: str, destinations: Mapping[str, Destination]) -> dict[str, torch.Tensor]:
        path = self.path(name)
        with explaining(path):
            ranges = SafetensorsFile(path).ranges()
        mapped = self._mapped(path)
        found, places = {}, []
        for key, stored in ranges.items():
            target = destinations.get(key, CPU)
            if isinstance(target, torch.Tensor):
                content = mapped[stored.offset : stored.offset + stored.nbytes]
                found[key] = target if self._takes(target, stored, content, path) else stored.mapped()
            elif target == CPU:
                found[key] = stored.mapped()
            else:
                found[key] = torch.empty(stored.shape, dtype=stored.dtype, device=target)
                places.append((stored.offset, bytes_of(found[key])))
        self._read(name, places, mapped)
        return found

    def fill(self) -> None:
        """Copy the data into the existing tensors of the run."""
        self.bring_in()
        copies, self._later = list(self._later.values()), {}
        host_memory.copy([(tensor, content) for tensor, content, _ in copies])

    def bring_in(self) -> None:
        """Raise if data that `fill` copies is no longer there, since touching its mapping would kill the process."""
        for path in {path for _, _, path in self._later.values()}:
            self._check_length(path)
        for _, content, path in self._later.values():
            if not _brought_in(content):
                raise blocks.damaged(path)

    def _mapped(self, path: Path) -> torch.Tensor:
        self._about[path] = path.stat()
        return mapped(path)

    def _check_length(self, path: Path) -> None:
        """Raise if a file was truncated since it was mapped. A file that was replaced is still mapped."""
        with suppress(FileNotFoundError):
            now, before = path.stat(), self._about[path]
            if os.path.samestat(now, before) and now.st_size < before.st_size:
                raise blocks.damaged(path)

    def _takes(self, tensor: torch.Tensor, stored: torch.Tensor | FileRange, content: torch.Tensor, path: Path) -> bool:
        """Register a stored tensor for a tensor of the run, if it has the same kind and takes no other one already."""
        if not _in_plain_memory(tensor) or _kind(tensor) != _kind(stored) or content.nbytes != tensor.nbytes:
            return False
        address = tensor.untyped_storage().data_ptr()
        if address in self._later:
            return False
        self._later[address] = (tensor, content, path)
        return True

    def _read(self, name: str, places: list[tuple[int, torch.Tensor]], mapped: torch.Tensor) -> None:
        places = sorted((place for place in places if len(place[1])), key=lambda place: place[0])
        with explaining(self.folder / name):
            read_file(self.folder / name, places, self.unchecked.pop(name, None), self.share, mapped)


def _brought_in(content: torch.Tensor) -> bool:
    """Whether a range of a mapped file can be read; True if the system cannot tell."""
    if not len(content):
        return True
    first = content.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return disk.bring_in(first, content.data_ptr() + len(content) - first) or not _can_bring_in()


def _can_bring_in() -> bool:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return disk.bring_in(torch.frombuffer(page, dtype=torch.uint8).data_ptr(), mmap.PAGESIZE)


def _in_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous in host memory, and its bytes are its values."""
    if not host_memory.is_plain(tensor) or tensor.device != CPU:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def _kind(tensor: torch.Tensor | FileRange) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _users(content: Any, addresses: Container[int]) -> dict[int, list[tuple[Any, tuple[Any, ...], torch.Tensor]]]:
    """The tensors in nested content whose storage has one of these addresses: the container of each, and its keys."""
    found: dict[int, list[tuple[Any, tuple[Any, ...], torch.Tensor]]] = defaultdict(list)

    def look(holder: Any, keys: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and (address := value.untyped_storage().data_ptr()) in addresses:
                found[address].append((holder, keys, value))
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(value, (*keys, key), item)

    look(None, (), content)
    return found
