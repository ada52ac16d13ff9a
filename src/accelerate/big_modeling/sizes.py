"""How many bytes a model needs, as a whole and in its parts."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.module_walk import TENSORS, Modules, Table, all_modules, own_tensors
from accelerate.config.enums import CustomDtype
from accelerate.io.stored_tensors import address_of
from accelerate.offload.module_tensors import resolve_dtype
from accelerate.torch_internals.modules import buffers_of

_CUSTOM_SIZES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}

Dtype = torch.dtype | CustomDtype | str


def dtype_byte_size(dtype: Dtype) -> int | float:
    """Return how many bytes one number of a dtype takes; a boolean counts as one bit.

    Args:
        dtype: the dtype.

    Raises:
        ValueError: it is not a dtype.
    """
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype: give one of torch's, such as torch.float16.")
    dtype = resolve_dtype(dtype)
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_SIZES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype: give one of torch's, such as torch.float16.")
    if dtype is torch.bool:
        return 1 / 8
    narrow = re.fullmatch(r"torch\.u?int([1-7])", str(dtype))
    return int(narrow.group(1)) / 8 if narrow else dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory of a tensor: its device, address and size in bytes.

    Args:
        tensor: the tensor.
    """
    return tensor.device, address_of(tensor), tensor.untyped_storage().nbytes()


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, Any]:
    """Return the bytes of every module and tensor of a model by name; those of the whole model are under "".

    A tied parameter counts once, under its first name.

    Args:
        model: the model, which may be empty.
        dtype: count floating-point tensors as if cast to it.
        special_dtypes: the same for single tensors, by name.
        buffers_only: count buffers only.
    """
    return sizes_in(all_modules(model), dtype, special_dtypes, (buffers_of,) if buffers_only else TENSORS)


def sizes_in(
    modules: Modules,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    tables: tuple[Table, ...] = TENSORS,
) -> defaultdict[str, Any]:
    """Do what `compute_module_sizes` does, for a model whose modules are already known.

    Whole numbers and booleans are never cast, and nothing becomes wider than it is.
    """
    special = special_dtypes or {}

    @functools.cache
    def width(own: torch.dtype) -> int | float:
        if dtype is None or not (own.is_floating_point or own.is_complex):
            return dtype_byte_size(own)
        return min(dtype_byte_size(dtype), dtype_byte_size(own))

    total: defaultdict[str, Any] = defaultdict(int)
    around: dict[str, list[str]] = {}  # for modules next to each other, those that contain them, the outermost first
    for table in tables:
        for module, tensors in own_tensors(modules, table):
            own = {
                name: tensor.numel() * (dtype_byte_size(special[name]) if name in special else width(tensor.dtype))
                for name, tensor in tensors
            }
            size = sum(own.values())
            parent = module.rpartition(".")[0]
            if parent not in around:
                around[parent] = [*_outer(parent), parent]
            for name in around[parent]:
                total[name] += size
            if module:
                total[module] += size
            total.update(own)
    return total


def _outer(name: str) -> list[str]:
    """Return the modules that contain a module, the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> Any:
    """Return the bytes of all buffers of a model.

    Args:
        model: the model, which may be empty.
        dtype: count floating-point buffers as if cast to it.
        special_dtypes: the same for single buffers, by name.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, Any]) -> list[str]:
    """Return the names from `compute_module_sizes` that contain no others.

    Args:
        module_sizes: names to bytes.
    """
    inner = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in inner]


def layers(
    modules: Iterable[tuple[str, Any]], no_split_module_classes: Sequence[str] | set[str]
) -> Iterator[tuple[str, Any]]:
    """Iterate over the parts that are never split, in order: modules without children, and those of given classes."""
    for name, module in modules:
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if not children or type(module).__name__ in no_split_module_classes:
            yield name, module
        else:
            yield from layers([(f"{name}.{child}", value) for child, value in children], no_split_module_classes)


def get_max_layer_size(
    modules: Iterable[tuple[str, Any]],
    module_sizes: Mapping[str, Any],
    no_split_module_classes: Sequence[str] | set[str],
) -> tuple[Any, list[str]]:
    """Return the size of the largest layer, and the names of the layers of that size.

    A layer is a module without children, or one of a class that is never split.

    Args:
        modules: pairs of name and module, which are searched with their submodules.
        module_sizes: the bytes of all modules, from `compute_module_sizes`.
        no_split_module_classes: names of classes that are never split.
    """
    biggest: Any = 0
    names: list[str] = []
    for name, _ in layers(modules, no_split_module_classes):
        size = module_sizes[name]
        if size > biggest:
            biggest, names = size, [name]
        elif size == biggest:
            names.append(name)
    return biggest, names


def direct_parts(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the tensors and modules that are directly in a model, with their names."""
    return [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]


def calculate_maximum_sizes(model: nn.Module) -> tuple[Any, tuple[Any, list[str]]]:
    """Return the bytes of a model, and those of its largest layer with the names of the layers of that size.

    Args:
        model: the model, which may be empty.
    """
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(direct_parts(model), sizes, no_split)
