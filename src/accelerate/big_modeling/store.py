"""Where offloaded weights lie: in memory, in files of their own, or in the safetensors files they came in."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelerate.bounded import read_json, safetensors_header
from accelerate.devices.staging import Buffer, Memory, Source, bytes_of
from accelerate.errors import CheckpointError

INDEX = "index.json"
_WRITERS = 8
# How many files of its own a model keeps mapped: a process can have 65,530 mappings, and needs some for other things.
_MOST_MAPPED = 16_384

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    # Of later versions of torch.
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
    "F4": getattr(torch, "float4_e2m1fn_x2", None),
}


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

    def opened(self) -> Source:
        """Its bytes, for threads that bring them to a device."""
        handle = self.open()
        # A file that has lost its name is still mapped.
        return Memory(self.mapped()) if handle is None else _OpenFile(self, handle)

    def read_into(self, address: memoryview, start: int, reader: Reader) -> None:
        """Fill `address` with the bytes from `start` on."""
        try:
            handle = reader.open(self)
            if handle is None:
                address[:] = bytes_of(self.mapped())[start : start + len(address)].numpy().data
            else:
                read_fully(handle, address, self.offset + start, self.path)
        except OSError as error:
            reason = error.strerror or "it has become shorter"
            raise CheckpointError(f"{self.path} cannot be read ({reason}): load another checkpoint.") from error


class _OpenFile:
    """A part of a file to be read, open until all of it was."""

    def __init__(self, place: FileRange, handle: int) -> None:
        self._place = place
        self._handle = handle

    def fill(self, buffer: Buffer, start: int, size: int) -> None:
        view = buffer.view if size == len(buffer.view) else buffer.view[:size]
        read_fully(self._handle, view, self._place.offset + start, self._place.path)

    def close(self) -> None:
        os.close(self._handle)


class Reader:
    """Leaves the file open that was read last: most of the time the next tensor lies in the same one."""

    def __init__(self) -> None:
        self._last: FileRange | None = None
        self._handle: int | None = None

    def open(self, place: FileRange) -> int | None:
        """A handle to read a tensor from; None where its file has lost its name."""
        if self._last is None or self._last.path != place.path or self._last.file is not place.file:
            self.close()
            self._handle = place.open()
            self._last = place
        return self._handle

    def close(self) -> None:
        self._last = None
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_fully(handle: int, address: memoryview, offset: int, path: str) -> None:
    """Fill `address` with the bytes of an open file from `offset` on."""
    done = os.preadv(handle, [address], offset)
    while done < len(address):
        count = os.preadv(handle, [address[done:]], offset + done)
        if count == 0:
            raise OSError(f"{path} ended while an offloaded weight was being read: offload it again.")
        done += count


class SafetensorsFile:
    """The table of contents of a safetensors file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = os.fspath(path)
        self._file = KeptFile(self.path)
        try:
            self._entries, self._start = safetensors_header(self.path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path} cannot be read ({reason}): load another checkpoint.") from error
        self.metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def range_of(self, name: str) -> FileRange:
        if name not in self._entries:
            raise KeyError(f"{self.path} holds no tensor called {name!r}: offload the model again.")
        entry = self._entries[name]
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has the type {entry['dtype']}, which torch {torch.__version__} does not know")
        shape = tuple(entry["shape"])
        if entry["dtype"] == "F4":  # torch has two of them in one
            shape = (*shape[:-1], shape[-1] // 2)
        begin, end = entry["data_offsets"]
        place = FileRange(self.path, self._start + begin, shape, dtype, self._file)
        if place.nbytes != end - begin or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{self.path} is damaged, since its header gives {end - begin} bytes to {name}, which has shape "
                f"{list(shape)} and dtype {dtype}: load another checkpoint."
            )
        return place


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write one weight into a file of the folder, and what is needed to read it into `index`. Returns the index."""
    index = {} if index is None else index
    if hasattr(weight, "__tensor_flatten__"):
        raise ValueError(
            f"{weight_name} is a {type(weight).__name__}, which is made of several tensors and cannot be written to "
            f"{offload_folder}: keep it in memory."
        )
    raw = weight.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    with _draft_of(os.path.join(offload_folder, f"{weight_name}.dat")) as draft, open(draft, "wb") as file:
        if raw.numel():
            file.write(bytes_of(raw).numpy().data)
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


@contextmanager
def _draft_of(path: str) -> Iterator[str]:
    """A name to write a file under, which gets its own when it is whole; where that fails, nothing is left.

    A file that is mapped by another model must not change under it, and other processes may write the same.
    """
    draft = f"{path}.{secrets.token_hex(4)}.draft"
    try:
        yield draft
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        told = type(error)(
            f"{path} cannot be written ({reason}): free some space there, or give another folder to offload to."
        )
        told.errno = error.errno
        raise told from error


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """A weight that `offload_weight` wrote, as a view of its file. weight_info: its entry in the index."""
    return _own_file(os.fspath(weight_file), weight_info).mapped()


def _own_file(path: str, info: Mapping[str, Any]) -> FileRange:
    return FileRange(path, 0, tuple(info["shape"]), getattr(torch, info["dtype"]))


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add the entries of an index to that of a folder, and write it down. Nothing is done for an empty one."""
    if not index:
        return
    _write_index({**load_offload_index(offload_folder), **index}, offload_folder)


def _write_index(index: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    with _draft_of(os.path.join(folder, INDEX)) as draft:
        Path(draft).write_text(json.dumps(index, indent=2))


def load_offload_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The index of a folder; an empty one where there is none."""
    path = Path(folder) / INDEX
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): remove it, and offload the model again.") from error
    return content


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all weights of a state dict into a folder, one file each, and their index."""
    os.makedirs(save_dir, exist_ok=True)
    _write_all(save_dir, state_dict)


def keep_on_disk(folder: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Make sure that a folder has the weights of a state dict. What is there already is not written again.

    Weights on the meta device must be there: they have no value to be written.
    """
    os.makedirs(folder, exist_ok=True)
    there = OffloadedWeightsLoader(save_folder=folder, index=load_offload_index(folder))
    lost = [name for name, weight in state_dict.items() if weight.is_meta and name not in there]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} cannot be offloaded to disk: {'they have' if len(lost) > 1 else 'it has'} no value "
            f"(meta device), and {folder} holds none either; load the weights first, or name the folder that has them."
        )
    _write_all(folder, {name: weight for name, weight in state_dict.items() if not _lies_there(there, name, weight)})
    if not os.path.exists(os.path.join(folder, INDEX)):
        _write_index({}, folder)  # a model without weights


def _lies_there(there: OffloadedWeightsLoader, name: str, weight: torch.Tensor) -> bool:
    if weight.is_meta:
        return True
    if name not in there:
        return False
    try:
        kept = there.locate(name)
        if kept.shape != tuple(weight.shape) or kept.dtype != weight.dtype:
            return False
        return torch.equal(kept.mapped(), weight.detach().to("cpu"))
    except (OSError, CheckpointError, LookupError, ValueError, TypeError, MemoryError):  # its file is gone, or damaged
        return False


def _write_all(folder: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    def write(item: tuple[str, torch.Tensor]) -> dict[str, Any]:
        return offload_weight(item[1], item[0], folder)

    index: dict[str, Any] = {}
    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1)) as writers:
        try:
            for entry in writers.map(write, state_dict.items()):
                index.update(entry)
        except BaseException:
            writers.shutdown(wait=False, cancel_futures=True)  # what is being written is waited for
            raise
    # Last, so that a folder with an index is complete.
    save_offload_index(index, folder)


class PrefixedDataset(Mapping[str, Any]):
    """The part of a mapping whose keys begin with a prefix, without it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, wherever they lie: in a state dict, in a folder of offloaded weights, in safetensors files.

    state_dict: weights in memory. save_folder: a folder that `offload_state_dict` wrote. index: what stands in its
    index.json; an entry may also name a safetensors file (`safetensors_file`, `weight_name`, `dtype`).
    device: where weights from safetensors files are put; the CPU by default.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("There is nothing to load weights from: give a state_dict, a save_folder or an index.")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None and not os.path.isfile(os.path.join(save_folder, INDEX)):
            raise FileNotFoundError(
                f"{save_folder} holds no offloaded weights ({INDEX}): give the folder that has them."
            )
        if index is None:
            index = {} if save_folder is None else load_offload_index(save_folder)
        self.index = index
        self._folder = None if save_folder is None else os.path.abspath(save_folder)
        self.all_keys: list[str] = [*self.state_dict, *(key for key in index if key not in self.state_dict)]
        self.device = device
        self._files: dict[str, SafetensorsFile] = {}
        self._ranges: dict[str, tuple[Any, FileRange]] = {}

    def locate(self, key: str) -> FileRange:
        """Where in which file a weight lies. From then on it is that file, whatever becomes of its name.

        Of very many files, the last ones are looked for by name each time.
        """
        info = self.index[key]
        known, place = self._ranges.get(key, (None, None))
        if place is None or known is not info:
            place = self._find(key, info)
            if place.file is None and place.nbytes and len(self._ranges) < _MOST_MAPPED:
                place = place.kept()
            self._ranges[key] = info, place
        return place

    def _find(self, key: str, info: Mapping[str, Any]) -> FileRange:
        file = info.get("safetensors_file")
        if file is None:
            if self._folder is None:
                raise KeyError(f"The index has {key!r} in a file of its own, and no folder: give save_folder.")
            return _own_file(os.path.join(self._folder, f"{key}.dat"), info)
        if file not in self._files:
            self._files[file] = SafetensorsFile(file)
        return self._files[file].range_of(info.get("weight_name", key))

    def dtype_of(self, key: str) -> torch.dtype:
        """The dtype a weight is wanted in; in its file it may have another."""
        named = self.index[key].get("dtype")
        return getattr(torch, named) if named is not None else self.locate(key).dtype

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        weight = self.locate(key).mapped()
        if self.index[key].get("safetensors_file") is None:
            return weight
        return weight.to(device=self.device, dtype=self.dtype_of(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def find_source(weights: Mapping[str, Any], name: str) -> torch.Tensor | FileRange:
    """What is behind a name: the tensor in memory, or its place in a file."""
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            return weights.state_dict[name]
        return weights.locate(name)
    found: torch.Tensor = weights[name]
    return found


def full_name(weights: Mapping[str, Any], name: str) -> str:
    """A name as it is in the mapping under all prefixes: with that of its module."""
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    return name


def root_of(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping under all prefixes."""
    while isinstance(weights, PrefixedDataset):
        weights = weights.dataset
    return weights


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """The entries of a state dict that belong to some modules (or are themselves named)."""
    wanted = set(submodule_names)
    return {key: value for key, value in state_dict.items() if not wanted.isdisjoint(_names_above(key))}


def _names_above(name: str) -> Iterator[str]:
    """A name, the modules that contain it, and the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
