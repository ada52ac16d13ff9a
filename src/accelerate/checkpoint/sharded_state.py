"""Folders of torch.distributed.checkpoint: each rank writes its shards, and any number of ranks can read them."""

from __future__ import annotations

import enum
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from accelerate.checkpoint.agreement import explained
from accelerate.comm.tree import recursively_apply
from accelerate.errors import CheckpointError
from accelerate.io import disk
from accelerate.io.blocks import FileEntry, summed_up
from accelerate.io.disk import open_plain
from accelerate.io.host_memory import HostMemory
from accelerate.io.safe_load import explaining, load

# Which tensor takes what is stored under these keys: given its size and dtype.
FindTensor = Callable[[tuple[Any, ...], torch.Size, torch.dtype], torch.Tensor]


@dataclass
class Shards:
    """A folder that all ranks write together.

    name: the name of the folder. key: the key of the content in it. content: nested, with tensors or DTensors.
    """

    name: str
    key: str
    content: dict[str, Any]

    def copied(self, memory: HostMemory) -> Shards:
        # Tensors in pieces have to stay such, so the memory of files is of no use here.
        return Shards(self.name, self.key, recursively_apply(_on_host, self.content))

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
        path = folder / self.name
        writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.save({self.key: self.content}, storage_writer=writer, process_group=group)
            except CheckpointException as error:  # no Exception, but raised on all processes alike
                failed, (failure, _) = next(iter(error.failures.items()))
                known = failure if isinstance(failure, Exception) else RuntimeError(failure)
                raise CheckpointError(explained(known, failed)) from error
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        own = [*path.glob(f"__{rank}_*"), *([path / ".metadata"] if rank == 0 else [])]
        disk.sync_folder(path)
        return {f"{self.name}/{file.name}": summed_up(file) for file in own}


def read(folder: Path, place: FindTensor) -> dict[str, Any]:
    """The content of a folder, nested as it was saved, without the key that everything is stored under.

    place: gives the tensor to read a stored one into, which may be a shard. No other rank takes part.
    """
    reader = FolderReader(folder)
    metadata = reader.read_metadata()
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in metadata.state_dict_metadata}
    flat: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        flat[key] = None
        if isinstance(kind, TensorStorageMetadata):
            flat[key] = place(paths[key][1:], kind.size, kind.properties.dtype)
    fill(flat, reader)
    (content,) = _nested(flat, paths).values()
    return content


def _nested(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Flattened content, nested again. paths: for each key, the keys of dicts and indices of lists that lead to it."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        holder: Any = root
        *way, last = paths[key]
        for step, following in zip(way, (*way[1:], last), strict=True):
            holder = _at(holder, step, {} if isinstance(following, str) else [])
        _at(holder, last, None)
        holder[last] = value
    return root


def _at(holder: Any, step: Any, new: Any) -> Any:
    """The item at one step of a path, which is set to `new` if it is missing."""
    if isinstance(holder, dict):
        return holder.setdefault(step, new)
    holder.extend([None] * (step + 1 - len(holder)))
    if holder[step] is None:
        holder[step] = new
    return holder[step]


def fill(flat: dict[str, Any], reader: FolderReader) -> None:
    """Read the stored tensors into those of `flat`, and replace other values by the stored ones."""
    folder = Path(reader.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is used, which is the point
        try:
            _load_alone(flat, storage_reader=reader, planner=_FolderPlanner(folder), no_dist=True)
        except CheckpointException as error:
            failure, _ = next(iter(error.failures.values()))
            if isinstance(failure, CheckpointError):
                raise failure from error
            raise CheckpointError(
                f"{folder} cannot be read ({type(failure).__name__}: {failure}): copy the checkpoint again, or load "
                "another one."
            ) from error


def _load_alone(*args: Any, **kwargs: Any) -> None:
    # Before torch 2.7 `load` knows no `no_dist`, and asks all processes of the group.
    knows = "no_dist" in inspect.signature(dcp.load).parameters
    (dcp.load if knows else dcp.load_state_dict)(*args, **kwargs)


def whole(keys: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of the full size, in host memory."""
    return torch.empty(size, dtype=dtype)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


class _FolderPlanner(DefaultLoadPlanner):
    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Plain data, and nothing that is run.
        with explaining(self._folder):
            self.state_dict[read_item.dest_index.fqn] = load(value)


class FolderReader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open_plain(path) as file:
                metadata: Metadata = _Unpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: this is not a complete folder of shards; load another one."
            ) from None
        except Exception as error:  # a damaged pickle may fail with anything
            raise CheckpointError(f"{path} cannot be read ({error}): load another checkpoint.") from error
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Reads descriptions of tensors and nothing else: only the classes listed here, which hold values.

    A name in a pickle may be a path of attributes, and lead from any module to everything that it imports. Names that
    are not listed are not looked up.
    """

    _PLAIN = {
        "builtins": {"set", "frozenset", "list", "dict", "tuple", "int", "str", "bytes", "slice", "complex", "float"},
        "collections": {"OrderedDict", "defaultdict"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
        "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        # As torch wrote them before 2.3.
        "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    }

    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        if (module, name) == ("builtins", "getattr"):
            found = _member
        elif module == "torch":
            found = getattr(torch, name, None)
            plain = isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
            found = found if plain or found in (torch.Size, torch.device) else None
        elif name in self._PLAIN.get(module, ()):
            found = super().find_class(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not run")
        return found


def _member(kind: Any, name: Any) -> enum.Enum:
    """Replaces `getattr`, which Python 3.11.0 to 3.11.3 call for a member of an enum."""
    if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it refers to builtins.getattr of {kind!r}, which is not run")
