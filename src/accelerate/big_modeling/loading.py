"""From the files of a checkpoint into a model, each weight to its device."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.big_modeling.device_map_checks import (
    closest_entry,
    no_device_for,
    refuse_devices,
    warn_of_unknown_names,
)
from accelerate.big_modeling.offloaded_models import quantize_and_offload_8bit
from accelerate.big_modeling.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
)
from accelerate.big_modeling.weight_files import (
    Contents,
    open_weights,
    refuse_shapes,
    refuse_swapped,
    report_names,
    weight_files,
)
from accelerate.checkpoint.rollback import loads_by_own_code, restore_model
from accelerate.devices.base import DeviceLike
from accelerate.devices.staging import HostTensor
from accelerate.errors import CheckpointError, Unfit
from accelerate.hooks.align import take_over
from accelerate.io.read_tensors import Read, read_all
from accelerate.io.stored_tensors import FileRange, StoredTensor
from accelerate.modules import model_has_dtensor
from accelerate.offload.module_tensors import (
    PLACEHOLDERS,
    extra_state_names,
    names_of_shared,
    resolve_dtype,
    set_module_tensor_to_device,
    table_of,
    tensor_places,
)
from accelerate.offload.offloaded_weights import offload_weight, save_offload_index
from accelerate.offload.parameter_kinds import is_packed, is_quantized, like
from accelerate.text import some_of
from accelerate.torch_internals.modules import buffers_of, parameters_of, set_metadata

logger: logging.Logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, DeviceLike] | None = None
) -> dict[str, Any]:
    """Load a weight file (safetensors or torch).

    Args:
        checkpoint_file: the file.
        device_map: module and tensor names to devices. Weights that it does not mention, or puts on "disk", go to the
            CPU.

    Returns:
        Names to tensors. On the CPU, those of a safetensors file are read as they are used.
    """
    sources, others, _ = open_weights(Path(checkpoint_file))
    devices = {name: _device_in_memory(_mapped_device(name, device_map)) for name in sources}
    reads = {
        name: Read(source, devices[name], source.dtype)
        for name, source in sources.items()
        if devices[name].type != "cpu"
    }
    read_all(list(reads.values()))
    found = {name: reads[name].result if name in reads else source.mapped() for name, source in sources.items()}
    return {**{name: value for name, value in found.items() if value is not None}, **others}


def _mapped_device(name: str, device_map: Mapping[str, DeviceLike] | None) -> DeviceLike:
    try:
        return "cpu" if device_map is None else device_of(name, device_map)
    except ValueError:
        return "cpu"


def _device_in_memory(device: DeviceLike) -> torch.device:
    return _CPU if device == "disk" else torch.device(device)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, DeviceLike] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights of a checkpoint into a model. If they do not fit, nothing is changed.

    Args:
        model: the model.
        checkpoint: a weight file (safetensors or torch), the index of a sharded checkpoint, or the folder of either.
        device_map: module and tensor names to devices. Without one, weights stay where they are, and empty ones go to
            the CPU.
        offload_folder: the folder for weights on "disk". Those in safetensors files stay in these files.
        dtype: with a device map, cast floating-point weights to it. By default, to the dtype that the model has.
        offload_state_dict: has no effect, since weights are never in memory twice.
        offload_buffers: offload the buffers of modules on "disk" as well.
        keep_in_fp32_modules: names of modules that stay in float32 when `dtype` is float16.
        offload_8bit_bnb: quantize the weights of 8-bit layers on "disk" first.
        strict: raise an error if the checkpoint lacks weights or has others, instead of a warning.
        full_state_dict: for a sharded model without a device map: whether the checkpoint has full tensors.
        broadcast_from_rank0: for a sharded model without a device map: only rank 0 reads the checkpoint.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the model.
        ValueError: the device map does not cover the weights, or puts some on "disk" and there is no folder.
    """
    refuse_swapped("load_checkpoint_in_model", model)
    given: Any = device_map
    if isinstance(given, str):
        raise ValueError(
            f"device_map is {given!r}: pass a device map, or use `load_checkpoint_and_dispatch`, which infers one."
        )
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        logger.warning("The config of this model asks for tied weights, but none are tied: call `tie_weights` first.")
    if device_map is None and (broadcast_from_rank0 or not full_state_dict or model_has_dtensor(model)):
        from accelerate.big_modeling.sharded_models import load_sharded

        load_sharded(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    if device_map is not None:
        warn_of_unknown_names(model, device_map)
        check_tied_parameters_on_same_device(tied, device_map)
        on_disk = [name or "the whole model" for name, device in device_map.items() if device == "disk"]
        if on_disk and offload_folder is None:
            raise ValueError(f"The device map puts {some_of(on_disk)} on disk: pass an offload_folder.")
    contents = Contents({}, {}, {})
    for path in weight_files(checkpoint):
        contents.add(open_weights(path))
    loader = _WeightLoader(
        model,
        contents,
        device_map=device_map or {},
        dtype=None if device_map is None else checked_dtype(dtype),
        keep_in_fp32=keep_in_fp32_modules or [],
        offload_buffers=offload_buffers,
        offload_8bit=offload_8bit_bnb,
    )
    sparse = loader.places.keys() & contents.others.keys()
    names_fit = not loader.missing and not loader.unexpected
    if device_map is None and (
        sparse or loads_by_own_code(model, names_fit, except_for=lambda hook: hook is take_over)
    ):
        loader.load_by_torch(checkpoint, strict)
        return
    report_names(model, checkpoint, loader.missing, loader.unexpected, strict)
    loader.check_shapes(checkpoint)
    if device_map is None:
        loader.fill()
    else:
        loader.place(offload_folder)
    loader.tie()


# What `mixed_precision` calls some dtypes.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def checked_dtype(dtype: Any) -> torch.dtype | None:
    """Return a dtype, which may be given by name, or raise an error if it is not one."""
    with contextlib.suppress(AttributeError):
        found = resolve_dtype(dtype)
        if found is None or isinstance(found, torch.dtype):
            return found
    meant = f" (did you mean `{_SHORT[dtype]}`?)" if isinstance(dtype, str) and dtype in _SHORT else ""
    raise ValueError(f"dtype is {dtype!r}{meant}: give a dtype of torch, or its name.")


@dataclass
class _WeightLoader:
    """Load weights into one model. The settings are those of `load_checkpoint_in_model`, for a device map."""

    model: nn.Module
    contents: Contents
    device_map: Mapping[str, DeviceLike]
    dtype: torch.dtype | None
    keep_in_fp32: list[str]
    offload_buffers: bool
    offload_8bit: bool

    def __post_init__(self) -> None:
        sources = self.contents.tensors
        self.places = tensor_places(self.model)
        self.shared = names_of_shared(self.places)
        self.groups = {name: group for group in self.shared for name in group}
        # Of a tensor that has several one name is enough, the first that there is a weight for.
        self.chosen = {group[0]: next((name for name in group if name in sources), None) for group in self.shared}
        same = {name for group in self.shared for name in group if name != self.chosen[group[0]]}
        self.statistics = {name: source for name, source in sources.items() if self._is_statistic(name)}
        self.found = {name: source for name, source in sources.items() if name in self.places and name not in same}
        entries = {**sources, **self.contents.others}
        self.extra_states = {name: entries[name] for name in extra_state_names(self.model) if name in entries}
        known = self.places.keys() | self.statistics.keys() | self.extra_states.keys()
        self.unexpected = sorted(entries.keys() - known)
        self.missing = sorted(self.places.keys() - self.found.keys() - same) + [
            name for group in self.shared if self.chosen[group[0]] is None for name in group
        ]

    def _is_statistic(self, name: str) -> bool:
        """Tell whether this belongs to an 8-bit weight, rather than being one."""
        module, _, last = name.rpartition(".")
        return last in ("SCB", "weight_format") and f"{module}.weight" in self.places

    def check_shapes(self, checkpoint: Any) -> None:
        tensors = {name: self.tensor(name) for name in self.found}
        shapes = {
            name: (tuple(self.found[name].shape), tuple(tensor.shape))
            for name, tensor in tensors.items()
            if not is_packed(tensor)
        }
        refuse_shapes(self.model, checkpoint, shapes)

    def tensor(self, name: str) -> torch.Tensor:
        module, attribute = self.places[name]
        tensor: torch.Tensor = getattr(module, attribute)
        return tensor

    def put(self, name: str, value: torch.Tensor) -> None:
        module, attribute = self.places[name]
        buffers = buffers_of(module)
        if attribute in buffers:
            buffers[attribute] = value
        else:
            parameters_of(module)[attribute] = like(self.tensor(name), value)

    def fill(self) -> None:
        """Fill the tensors of the model in place."""
        reads = {}
        for name, source in self.found.items():
            old = self.tensor(name)
            into = None if old.is_meta else old.detach()
            reads[name] = Read(source, _CPU if old.is_meta else old.device, old.dtype, into)
        try:
            read_all(list(reads.values()))
        except CheckpointError as error:
            if all(read.into is None for read in reads.values()):
                raise
            raise CheckpointError(
                f"The weights of this {type(self.model).__name__} may be partly loaded, because {error}"
            ) from error
        for name, read in reads.items():
            if read.into is None and read.result is not None:
                self.put(name, read.result)

    def place(self, folder: str | os.PathLike[str] | None) -> None:
        """Brings every weight to its device, those of the disk first: they are only written down.

        The model is left as it was until everything has been read.
        """
        self._prefer_memory()
        devices = self._devices()
        changes = self._leave_on_disk({name for name, device in devices.items() if device == "disk"}, folder)
        # With a GPU, what stays on the CPU is brought over again and again: from memory of its own, not from a file.
        alone = all(str(device) in ("cpu", "disk") for device in self.device_map.values())
        reads = {}
        for name, source in self.found.items():
            device = _device_in_memory(devices[name])
            dtype = self._wanted(name)
            if is_quantized(self.tensor(name)):
                changes.append(functools.partial(self._quantize, name, source, device))
            elif alone and device.type == "cpu" and dtype == source.dtype and isinstance(source, FileRange):
                with torch.inference_mode(False):  # as all that is read
                    changes.append(functools.partial(self.put, name, source.mapped()))
            elif device.type == "meta":
                changes.append(functools.partial(self._empty, name, dtype))
            else:
                reads[name] = Read(source, device, dtype)
        read_all(list(reads.values()))
        for change in changes:
            change()
        for name, read in reads.items():
            if read.result is not None:
                self.put(name, read.result)
        for name, state in self.extra_states.items():
            module = self.model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(state.mapped() if isinstance(state, (FileRange, HostTensor)) else state)

    def _prefer_memory(self) -> None:
        """Load a shared tensor under a name that is not on disk, if there is one; all names then use it."""
        for group in self.shared:
            loaded = self.chosen[group[0]]
            held = [name for name in group if _mapped_device(name, self.device_map) != "disk"]
            if loaded is not None and held and loaded not in held:
                self.found[held[0]] = self.found.pop(loaded)
                self.chosen[group[0]] = held[0]

    def _devices(self) -> dict[str, DeviceLike]:
        refuse_devices(self.device_map)
        entries = {name: closest_entry(name, self.device_map) for name in self.found}
        devices = {name: self.device_map[entry] for name, entry in entries.items() if entry is not None}
        gaps: list[str] = [name for name in self.found if devices.get(name) is None]
        if gaps:
            raise no_device_for(gaps)
        return devices

    def _wanted(self, name: str) -> torch.dtype:
        if self.dtype is None or not self.found[name].dtype.is_floating_point:
            return self.tensor(name).dtype
        kept = self.dtype == torch.float16 and any(key == name or f"{key}." in name for key in self.keep_in_fp32)
        return torch.float32 if kept else self.dtype

    def _leave_on_disk(self, names: set[str], folder: str | os.PathLike[str] | None) -> list[Callable[[], None]]:
        """Write down where weights are, and return what to do with the model after that."""
        changes: list[Callable[[], None]] = []
        if folder is None or not names:
            return changes
        os.makedirs(folder, exist_ok=True)
        index: dict[str, Any] = {}
        for name in sorted(names):
            module, attribute = self.places[name]
            if attribute in buffers_of(module) and not self.offload_buffers:
                continue  # it is read into memory, with all others
            dtype = self._wanted(name)
            source = self.found.pop(name)
            if is_quantized(self.tensor(name)) and self.offload_8bit:
                statistics = self._statistics_of(name)
                quantize_and_offload_8bit(self.model, source.mapped(), name, dtype, folder, index, statistics)
            elif isinstance(source, FileRange):
                place = {
                    "safetensors_file": os.path.abspath(source.path),
                    "weight_name": name,
                    "dtype": str(dtype).removeprefix("torch."),
                }
                index |= dict.fromkeys(self.groups.get(name, [name]), place)
            else:
                for alias in self.groups.get(name, [name]):
                    offload_weight(source.mapped().to(dtype), alias, folder, index)
            changes.append(functools.partial(self._empty, name, dtype))
        save_offload_index(index, folder)
        return changes

    def _empty(self, name: str, dtype: torch.dtype) -> None:
        set_module_tensor_to_device(self.model, name, "meta", dtype=dtype)

    def _quantize(self, name: str, source: StoredTensor, device: torch.device) -> None:
        set_module_tensor_to_device(
            self.model,
            name,
            device,
            value=source.mapped(),
            fp16_statistics=self._statistics_of(name),
            clear_cache=False,
        )

    def _statistics_of(self, name: str) -> torch.Tensor | None:
        found = self.statistics.get(f"{name.rpartition('.')[0]}.SCB")
        return None if found is None else found.mapped()

    def tie(self) -> None:
        """Pass on shared tensors that were loaded under one name to the modules that have the others."""
        for group in self.shared:
            loaded = self.chosen[group[0]]
            if loaded is not None:
                for name in group:
                    module, attribute = self.places[name]
                    table_of(module, attribute)[attribute] = self.tensor(loaded)

    def load_by_torch(self, checkpoint: Any, strict: bool) -> None:
        """Pass a checkpoint to `load_state_dict`. If that fails, the tensors of the model stay as they were."""
        tensors = {name: source.mapped() for name, source in self.contents.tensors.items()}
        state = OrderedDict(tensors | self.contents.others)
        if self.contents.metadata:
            set_metadata(state, OrderedDict(self.contents.metadata))
        with ExitStack() as undo:
            restore_model(self.model, undo)  # hooks may change anything
            empty = self._make_room()
            try:
                found: Any = self.model.load_state_dict(state, strict=False)
            except RuntimeError as error:
                raise Unfit(
                    f"{checkpoint} does not fit this {type(self.model).__name__} ({' '.join(str(error).split())}): "
                    "give the model that it was saved from."
                ) from error
            # A method of the model's own may return nothing.
            missing, unexpected = (set(getattr(found, f"{kind}_keys", ())) for kind in ("missing", "unexpected"))
            missing -= {name for group in self.shared if not missing.issuperset(group) for name in group}
            report_names(self.model, checkpoint, sorted(missing), sorted(unexpected), strict)
            undo.pop_all()
        for name in missing & empty.keys():
            module, attribute = self.places[name]
            table_of(module, attribute)[attribute] = empty[name]

    def _make_room(self) -> dict[str, torch.Tensor]:
        """Give empty tensors memory on the CPU, where torch writes their values; returns them by name."""
        empty: dict[str, torch.Tensor] = {}
        filled: dict[int, torch.Tensor] = {}  # one that has several names stays one
        for name, (module, attribute) in self.places.items():
            table = table_of(module, attribute)
            tensor = table[attribute]
            if is_lazy(tensor) or not tensor.is_meta or isinstance(tensor, PLACEHOLDERS):
                continue
            if id(tensor) not in filled:
                with torch.inference_mode(False):
                    zeros = torch.zeros_like(tensor, device="cpu")
                filled[id(tensor)] = like(tensor, zeros) if attribute in parameters_of(module) else zeros
            empty[name] = tensor
            table[attribute] = filled[id(tensor)]
        return empty
