"""Where offloaded weights are stored: in memory, in files of their own, or in the original safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate.devices.staging import bytes_of
from accelerate.errors import CheckpointError, a_kind_of
from accelerate.io.disk import read_json, replacing
from accelerate.io.stored_tensors import FileRange, SafetensorsFile

INDEX = "index.json"
_WRITERS = 8
# How many files of its own a model keeps mapped: a process can have 65,530 mappings, and needs some for other things.
_MOST_MAPPED = 16_384


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write one weight to a file in an offload folder.

    Args:
        weight: the weight.
        weight_name: its name.
        offload_folder: the folder.
        index: the index of the folder, which gets an entry for the weight. By default a new one.

    Returns:
        The index.

    Raises:
        ValueError: the weight is a tensor subclass that consists of several tensors.
    """
    index = {} if index is None else index
    if hasattr(weight, "__tensor_flatten__"):
        raise ValueError(
            f"{weight_name} is {a_kind_of(weight)}, which consists of several tensors and cannot be offloaded to "
            f"{offload_folder}: keep it in memory."
        )
    raw = weight.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    with _writing(os.path.join(offload_folder, f"{weight_name}.dat")) as draft, open(draft, "wb") as file:
        if raw.numel():
            file.write(bytes_of(raw).numpy().data)
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


@contextmanager
def _writing(path: str) -> Iterator[Path]:
    """A draft path that is renamed when the file is complete: another model may have the old file mapped."""
    try:
        with replacing(path) as draft:
            yield draft
    except OSError as error:
        reason = error.strerror or error
        told = type(error)(
            f"{path} cannot be written ({reason}): free some space there, or give another folder to offload to."
        )
        told.errno = error.errno
        raise told from error


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Load a weight that `offload_weight` wrote, as a view of its file.

    Args:
        weight_file: the file.
        weight_info: its entry in the index.
    """
    return _own_file(os.fspath(weight_file), weight_info).mapped()


def _own_file(path: str, info: Mapping[str, Any]) -> FileRange:
    return FileRange(path, 0, tuple(info["shape"]), getattr(torch, info["dtype"]))


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the index of an offload folder. An empty index is not written.

    Args:
        index: the entries.
        offload_folder: the folder.
    """
    if not index:
        return
    _write_index({**load_offload_index(offload_folder), **index}, offload_folder)


def _write_index(index: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    with _writing(os.path.join(folder, INDEX)) as draft:
        draft.write_text(json.dumps(index, indent=2))


def load_offload_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The index of a folder; empty if there is none."""
    path = Path(folder) / INDEX
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds {a_kind_of(content)}")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): remove it, and offload the model again.") from error
    return content


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all weights of a state dict to a folder, one file each, with an index.

    Args:
        save_dir: the folder, which is created if needed.
        state_dict: the weights.
    """
    os.makedirs(save_dir, exist_ok=True)
    _write_all(save_dir, state_dict)


def keep_on_disk(folder: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Make sure that a folder has the weights of a state dict. Existing weights are not written again.

    Weights on the meta device must exist there, since they have no values to write.
    """
    os.makedirs(folder, exist_ok=True)
    there = OffloadedWeightsLoader(save_folder=folder, index=load_offload_index(folder))
    lost = [name for name, weight in state_dict.items() if weight.is_meta and name not in there]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} cannot be offloaded to disk: {'they have' if len(lost) > 1 else 'it has'} no value "
            f"(meta device), and {folder} has none either: load the weights first, or pass the folder that has them."
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
    """View the entries of a mapping whose keys begin with a prefix, under keys without it.

    Args:
        dataset: the mapping.
        prefix: the prefix.
    """

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
    """Map names to weights, wherever they are: in a state dict, in a folder of offloaded weights, in safetensors files.

    Args:
        state_dict: weights in memory.
        save_folder: a folder that `offload_state_dict` wrote.
        index: the content of its `index.json`. An entry may also name a safetensors file (`safetensors_file`,
            `weight_name`, `dtype`).
        device: where weights from safetensors files are put. By default the CPU.

    Raises:
        ValueError: none of the first three is given.
        FileNotFoundError: the folder has no index.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs weights: pass a state_dict, a save_folder or an index.")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None and not os.path.isfile(os.path.join(save_folder, INDEX)):
            raise FileNotFoundError(f"{save_folder} has no offloaded weights ({INDEX}): pass the folder that has them.")
        if index is None:
            index = {} if save_folder is None else load_offload_index(save_folder)
        self.index = index
        self._folder = None if save_folder is None else os.path.abspath(save_folder)
        self.all_keys: list[str] = [*self.state_dict, *(key for key in index if key not in self.state_dict)]
        self.device = device
        self._files: dict[str, SafetensorsFile] = {}
        self._ranges: dict[str, tuple[Any, FileRange]] = {}

    def locate(self, key: str) -> FileRange:
        """Return the file and position of a weight. That file is used from then on, even if it is renamed or removed.

        In a folder with a very large number of files, the last ones are found by name each time.

        Args:
            key: the name of the weight.
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
                raise KeyError(
                    f"The index says that {key!r} has its own file, but no folder is given: pass save_folder."
                )
            return _own_file(os.path.join(self._folder, f"{key}.dat"), info)
        if file not in self._files:
            self._files[file] = SafetensorsFile(file)
        return self._files[file].range_of(info.get("weight_name", key))

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype that a weight is wanted in, which may differ from that in its file.

        Args:
            key: the name of the weight.
        """
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
    """The source of a weight: the tensor in memory, or its range in a file."""
    weights, name = without_prefixes(weights, name)
    if isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            return weights.state_dict[name]
        return weights.locate(name)
    found: torch.Tensor = weights[name]
    return found


def without_prefixes(weights: Mapping[str, Any], name: str = "") -> tuple[Mapping[str, Any], str]:
    """The mapping below all prefixes, and the full name that a weight has there."""
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    return weights, name


def full_name(weights: Mapping[str, Any], name: str) -> str:
    return without_prefixes(weights, name)[1]


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some submodules.

    Args:
        state_dict: the state dict.
        submodule_names: names of submodules, or of single entries.
    """
    wanted = set(submodule_names)
    return {key: value for key, value in state_dict.items() if not wanted.isdisjoint(_names_above(key))}


def _names_above(name: str) -> Iterator[str]:
    """A name, the names of the modules that contain it, and the empty name of the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
