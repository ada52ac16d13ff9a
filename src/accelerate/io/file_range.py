"""Tensors as they lie in files, to be mapped or to be read in pieces."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.devices.staging import HostTensor, OpenFiles, Stored


class StoredTensor(Stored, Protocol):
    """A tensor somewhere, which can be read in pieces. path: of its file; empty for one in memory."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def mapped(self) -> torch.Tensor:
        """Returns the tensor on the CPU, without reading it where that is possible."""


class KeptFile:
    """The bytes of a file as it was when this was made.

    They stay what they are for as long as this lives, also when the file is deleted or another one gets its name. It is
    mapped, and not open: thousands of weights may have a file each. Who writes to the bytes changes what is seen here,
    not the file: so that models have nothing in common, each has its own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            info = os.stat(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} with offloaded weights is not there: offload the model again.") from error
        self._identity = info.st_dev, info.st_ino  # not given to another file while this one is mapped
        mapped = torch.empty(0, dtype=torch.uint8, device="cpu")
        if info.st_size:
            storage: Any = torch.UntypedStorage.from_file(path, False, info.st_size)
            mapped.set_(storage)
        self.bytes: Any = mapped.numpy()

    def open(self) -> int | None:
        """A handle to read from; None where its name leads elsewhere by now."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        info = os.fstat(handle)
        if (info.st_dev, info.st_ino) == self._identity:
            return handle
        os.close(handle)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptFile:
        handle = self.open()
        if handle is None:
            return self
        os.close(handle)
        memo[id(self)] = made = KeptFile(self.path)
        return made

    def __reduce__(self) -> Any:
        """Another process looks for the file under its name."""
        return _not_kept, ()


def _not_kept() -> None:
    return None


class FileRange(NamedTuple):
    """A tensor as it lies in a file. file: that very file; without it, whichever has this path when it is read."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: KeptFile | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def kept(self) -> FileRange:
        """The same, of the file that has the path now."""
        return self._replace(file=KeptFile(self.path))

    def mapped(self) -> torch.Tensor:
        """The tensor as a view of the file: read from disk as it is touched, never written back."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        raw, offset = (self.file or KeptFile(self.path)).bytes, self.offset
        if offset + self.nbytes > len(raw):
            raise OSError(f"{self.path} is too short to hold its offloaded weight: offload it again.")
        if offset % self.dtype.itemsize:
            raw, offset = raw[offset : offset + self.nbytes].copy(), 0
        return torch.frombuffer(raw, dtype=self.dtype, count=count, offset=offset).view(self.shape)

    def open(self) -> int | None:
        """A handle to read from; None where the file has lost its name: it can be mapped then."""
        return os.open(self.path, os.O_RDONLY) if self.file is None else self.file.open()

    def read(self, view: memoryview, start: int, files: OpenFiles) -> None:
        """Fill memory with its bytes from `start` on."""
        handle = files.open(self)
        if handle is None:  # a file that has lost its name is still mapped
            HostTensor(self.mapped()).read(view, start, files)
        else:
            read_fully(handle, view, self.offset + start, self.path)


def read_fully(handle: int, address: memoryview, offset: int, path: str) -> None:
    """Fill `address` with the bytes of an open file from `offset` on."""
    done = os.preadv(handle, [address], offset)
    while done < len(address):
        count = os.preadv(handle, [address[done:]], offset + done)
        if count == 0:
            raise OSError(f"{path} ended while an offloaded weight was being read: offload it again.")
        done += count
