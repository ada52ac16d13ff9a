"""Which part of a model goes on which device."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.device_map_checks import clean_device_map
from accelerate.big_modeling.device_memory import MaxMemory, as_classes, get_max_memory
from accelerate.big_modeling.layers import BiggestLayer
from accelerate.big_modeling.module_walk import Modules, all_modules, without_collecting_garbage
from accelerate.big_modeling.pending import Pending
from accelerate.big_modeling.sizes import (
    Dtype,
    compute_module_sizes,
    compute_module_total_buffer_size,
    direct_parts,
    sizes_in,
)
from accelerate.big_modeling.ties import check_tied_parameters_on_same_device, ties_in
from accelerate.text import in_binary_units
from accelerate.torch_internals.modules import buffers_of, children_of, non_persistent_buffers, parameters_of

logger: logging.Logger = logging.getLogger(__name__)

NamedPart = tuple[str, Any]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Any]:
    """Choose a device for every part of a model: GPUs are filled first, then host memory, then the disk.

    Modules keep their order. If some of them are offloaded, the first GPU keeps room for the largest of these, and host
    memory for the largest one on disk. Tied parameters stay together. Only sizes matter, so the model may be empty.

    Args:
        model: the model.
        max_memory: the limit of each device, as in `get_max_memory`.
        no_split_module_classes: names of classes that are never split, such as blocks with a residual connection.
        dtype: count floating-point tensors as if cast to it.
        special_dtypes: the same for single tensors, by name.
        verbose: print every decision.
        clean_result: write one entry for a module whose parts are all on one device.
        offload_buffers: offload the buffers of offloaded modules as well.
        fallback_allocation: if the next module is too large for an empty device, look for a later one that fits.

    Returns:
        The device map: module and tensor names to devices.

    Example:
        ```python
        device_map = infer_auto_device_map(model, max_memory={0: "10GB", "cpu": "30GB"})
        model = dispatch_model(model, device_map)
        ```
    """
    with without_collecting_garbage():
        planner = _DeviceMapPlanner(
            model,
            max_memory,
            as_classes(no_split_module_classes),
            dtype,
            special_dtypes,
            verbose,
            count_buffers=not offload_buffers,
            fallback=fallback_allocation,
        )
        planner.run()
        planner.give_all_names()
        device_map = planner.device_map
        if clean_result:
            clean_device_map(device_map)
    planner.report()
    check_tied_parameters_on_same_device(planner.ties, device_map)
    return device_map


@dataclass
class _DeviceMapPlanner:
    """Assign the modules of a model to devices, in one pass over both."""

    model: nn.Module
    max_memory: Mapping[int | str, int | str] | None
    no_split: list[str]
    dtype: Dtype | None
    special_dtypes: Mapping[str, Dtype] | None
    verbose: bool
    count_buffers: bool
    fallback: bool

    def __post_init__(self) -> None:
        self.limits: MaxMemory = get_max_memory(self.max_memory)
        self.devices = [*(device for device in self.limits if device != "disk"), "disk"]
        self.gpus = [device for device in self.devices if device not in ("cpu", "disk")]
        # Those that keep room for the biggest layer that is offloaded.
        self.reserving = ["mps"] if "mps" in self.gpus else [*self.gpus[:1], "cpu"]
        modules = all_modules(self.model)
        self.sizes = sizes_in(modules, self.dtype, self.special_dtypes)
        self.ties = ties_in(modules)
        self.with_buffers = _with_buffers(modules)
        self.other_names = list(_other_names(modules))
        self.groups_of = _groups_of_modules(self.ties)
        entries = direct_parts(self.model)
        self.pending = Pending(entries)
        self.biggest = BiggestLayer(entries, self.sizes, self.no_split)
        self.device_map: OrderedDict[str, Any] = OrderedDict()
        self.used: dict[int | str, Any] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[int | str, Any] = dict.fromkeys(self.devices, 0)
        # Devices that nothing fitted on, and what the first try would have needed.
        self.too_small: dict[int | str, Any] = {}
        self.tried: set[tuple[int | str, str]] = set()
        self.current = 0

    @property
    def device(self) -> int | str:
        return self.devices[self.current]

    @property
    def reserve(self) -> Any:
        return self.biggest.size if self.device in self.reserving else 0

    @property
    def room(self) -> Any:
        """The room left on the current device: negative if the reserve alone is too large, unlimited on disk."""
        if self.device == "disk":
            return float("inf")
        return self.limits[self.device] - self.reserve - self.used[self.device]

    def say(self, text: str) -> None:
        if self.verbose:
            print(text)

    def run(self) -> None:
        while self.pending:
            name, part = self.pending.pop()
            self.biggest.take(name)
            tied = self._tied_entries(name)
            size = self.sizes[name]
            needed = size + sum(self.sizes[other] for other in tied)
            self.say(f"{name}: {needed} bytes{_with(tied)}, room on {self.device}: {self.room}")
            if needed <= self.room:
                self._place(name, part, tied, needed)
            elif tied and size <= self.room:
                # It would fit alone, so what it is tied to is to be split.
                if self._split_one_of(tied):
                    self.pending.push([(name, part)])
                    self.biggest.find_again()
                else:
                    self._leave_device(name, part, needed)
            elif _can_split(part, self.no_split):
                self.say(f"  too big for {self.device}: split")
                self.pending.push(_parts_of(name, part))
                self.biggest.find_again()
            else:
                self._leave_device(name, part, needed)

    def give_all_names(self) -> None:
        """Give all names that a parent has for one module the device of the first."""
        for other, first in reversed(self.other_names):  # the innermost before what contains them
            for name in [name for name in self.device_map if _inside(name, first)]:
                self.device_map[f"{other}{name.removeprefix(first)}"] = self.device_map[name]

    def _tied_entries(self, name: str) -> list[str]:
        """Return the pending modules that hold a parameter of this one under another name."""
        found: dict[str, None] = {}
        for group in self.groups_of.get(name, ()):
            for other in group:
                if not _inside(other, name):
                    holder = self.pending.holder(other)
                    if holder is not None:
                        found[holder] = None
        return list(found)

    def _place(self, name: str, part: Any, tied: list[str], needed: Any) -> None:
        self.say(f"  goes on {self.device}{_with(tied)}")
        self.used[self.device] += needed
        for placed in (name, *tied):
            self.device_map[placed] = self.device
            self.biggest.place(placed)
        for other in tied:
            self.pending.remove(other)
        if self.count_buffers and isinstance(part, nn.Module) and name in self.with_buffers:
            self.buffers[self.device] += compute_module_total_buffer_size(part, self.dtype, self.special_dtypes)

    def _split_one_of(self, names: list[str]) -> bool:
        for name in names:
            if _can_split(self.pending[name], self.no_split):
                self.say(f"  no room for {name} as well: split that")
                self.pending.replace(name, _parts_of(name, self.pending[name]))
                return True
        return False

    def _leave_device(self, name: str, part: Any, needed: Any) -> None:
        if self.used[self.device] == 0:
            if self.fallback:
                # Room for this module is kept, too, since it is offloaded then.
                limit = self.limits[self.device] - max(self.biggest.size, needed)
                later, later_part, rest = fallback_allocate(
                    list(self.pending), self.sizes, limit, self.no_split, self.ties
                )
                # What is tied to this very module does not fit after all, and is not tried twice.
                if later is not None and (self.device, later) not in self.tried:
                    self.tried.add((self.device, later))
                    self.say(f"  too big for {self.device}: {later} goes there first")
                    self.pending = Pending([(later, later_part), (name, part), *rest])
                    return
            self.too_small[self.device] = needed + self.reserve
        self.say(f"  too big for {self.device}, and cannot be split: on to {self.devices[self.current + 1]}")
        self.used[self.device] += self.reserve
        self.current += 1
        self.pending.push([(name, part)])

    def report(self) -> None:
        """Warn about what the plan has no room for."""
        offloaded = self.buffers.get("cpu", 0) + self.buffers["disk"]
        roomy = any(self.limits[device] >= offloaded + self.used[device] for device in self.gpus)
        if offloaded > 0 and self.count_buffers and self.gpus and not roomy:
            warnings.warn(
                f"Offloaded modules have {in_binary_units(offloaded)} of buffers, which stay on a GPU, but no GPU has "
                "that much memory left: pass offload_buffers=True if memory runs out.",
                stacklevel=3,
            )
        if self.too_small:
            short = ", ".join(
                f"{device} (needs {in_binary_units(needed)}, has {in_binary_units(self.limits[device])})"
                for device, needed in self.too_small.items()
            )
            logger.info(f"No module fits on {short}: raise max_memory there, or allow modules to be split.")


def refuse_disk(
    model: nn.Module,
    device_map: Mapping[str, Any],
    max_memory: Mapping[int | str, int | str] | None,
    dtype: Dtype | None = None,
) -> None:
    """Raise an error if a map that was found for a model needs the disk, and there is no folder."""
    if "disk" not in device_map.values():
        return
    sizes = compute_module_sizes(model, dtype)
    left = sum(sizes[name] for name, device in device_map.items() if device == "disk")
    limits = ", ".join(f"{device} has {in_binary_units(limit)}" for device, limit in get_max_memory(max_memory).items())
    raise ValueError(
        f"This {type(model).__name__} does not fit: it needs {in_binary_units(sizes[''])}, plus room for its largest "
        f"layer, and {limits}; the remaining {in_binary_units(left)} need an offload_folder, or more memory."
    )


def _with(names: list[str]) -> str:
    return f" with {', '.join(names)}" if names else ""


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _with_buffers(modules: Modules) -> set[str]:
    """Return the names of all modules that have a buffer, directly or in a submodule."""
    found: set[str] = set()
    for name, module in modules:
        if buffers_of(module):
            while name and name not in found:
                found.add(name)
                name = name.rpartition(".")[0]
    return found


def _other_names(modules: Modules) -> Iterator[tuple[str, str]]:
    """Iterate over the other names that a tensor or module has in the same parent, each with the first."""
    for parent, module in modules:
        start = f"{parent}." if parent else ""
        for table in (parameters_of(module), buffers_of(module), children_of(module)):
            first: dict[int, str] = {}
            for name, part in table.items():
                if part is not None and first.setdefault(id(part), name) != name:
                    yield f"{start}{name}", f"{start}{first[id(part)]}"


def _groups_of_modules(ties: list[list[str]]) -> dict[str, list[list[str]]]:
    """Return the groups that every module with tied parameters, and every such parameter, belongs to."""
    found: dict[str, list[list[str]]] = {}
    for group in ties:
        holders: dict[str, None] = {}
        for name in group:
            while name and name not in holders:
                holders[name] = None
                name = name.rpartition(".")[0]
        for name in holders:
            found.setdefault(name, []).append(group)
    return found


def _can_split(part: Any, no_split: list[str]) -> bool:
    has_children = isinstance(part, nn.Module) and next(part.children(), None) is not None
    return has_children and type(part).__name__ not in no_split


def _parts_of(name: str, module: nn.Module) -> list[NamedPart]:
    """Return the parts that replace a module when it is split. Buffers that are not saved go with what uses them."""
    left_out = non_persistent_buffers(module)
    saved = [(key, value) for key, value in module.named_buffers(recurse=False) if key not in left_out]
    parts = [*module.named_parameters(recurse=False), *saved, *module.named_children()]
    return [(f"{name}.{key}", part) for key, part in parts]


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: Any,
    module_sizes: Mapping[str, Any],
    modules_to_treat: Iterable[NamedPart],
) -> tuple[Any, list[str], list[Any]]:
    """Return the size of a module together with the modules that hold its tied parameters.

    Args:
        tied_params: names of the tied parameters outside the module.
        module_size: the bytes of the module.
        module_sizes: the bytes of all modules, from `compute_module_sizes`.
        modules_to_treat: pairs of name and module in which the tied parameters are looked for.

    Returns:
        The total size, the names of the modules that hold the tied parameters, and these modules.
    """
    pending = Pending(modules_to_treat)
    holders = {name: holder for name in tied_params if (holder := pending.holder(name)) is not None}
    names = list(dict.fromkeys(holders.values()))
    # What is tied is counted with the module itself; unless that is too small, so that the sizes count it elsewhere.
    again = sum(size for name in holders if (size := module_sizes.get(name, 0)) <= module_size)
    return module_size + sum(module_sizes[name] for name in names) - again, names, [pending[name] for name in names]


def fallback_allocate(
    modules: list[NamedPart],
    module_sizes: Mapping[str, Any],
    size_limit: Any,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[NamedPart]]:
    """Find the first module that fits a limit, together with everything it is tied to.

    Modules are split in the search; the other modules that are returned then include the parts.

    Args:
        modules: pairs of name and module.
        module_sizes: the bytes of all modules, from `compute_module_sizes`.
        size_limit: the limit in bytes.
        no_split_module_classes: names of classes that are never split.
        tied_parameters: groups of names of tied parameters, from `find_tied_parameters`.

    Returns:
        The name of the module, the module, and the pairs that remain. If none fits: None, None, and the modules as
        given.
    """
    no_split = as_classes(no_split_module_classes)
    groups_of = _groups_of_modules(tied_parameters or [])
    search, everything = Pending(modules), Pending(modules)
    split: list[str] = []
    while search:
        name, part = search.pop()
        outside = [other for group in groups_of.get(name, ()) for other in group if not _inside(other, name)]
        holders = dict.fromkeys(everything.holder(other) for other in outside)
        if module_sizes[name] + sum(module_sizes[holder] for holder in holders if holder is not None) <= size_limit:
            break
        if _can_split(part, no_split):
            parts = _parts_of(name, part)
            search.push(parts)
            everything.replace(name, parts)
            split.append(name)
    else:
        return None, None, modules
    rest = Pending(modules)
    for parent in split:
        if _inside(name, parent):
            rest.replace(parent, _parts_of(parent, rest[parent]))
    rest.remove(name)
    return name, part, list(rest)
