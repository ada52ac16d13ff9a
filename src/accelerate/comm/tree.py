"""Nested data: lists, tuples, namedtuples, mappings and dataclasses with tensors somewhere inside."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accelerate.config.tensors import TensorInformation
from accelerate.errors import a_kind_of


def is_torch_tensor(tensor: Any) -> bool:
    """Tell whether an object is a tensor.

    Args:
        tensor: any object.
    """
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Tell whether an object is a tensor on an XPU.

    Args:
        tensor: any object.
    """
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Tell whether an object is a `TensorInformation`.

    Args:
        tensor_info: any object.
    """
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Tell whether an object is a named tuple, of `collections.namedtuple` or `typing.NamedTuple`.

    Args:
        data: any object.
    """
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Put items into a container of the same type as another one.

    Args:
        obj: the container whose type is used: a list, tuple or named tuple.
        generator: the items.

    Returns:
        The new container.
    """
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the same type as `obj`."""
    if isinstance(obj, defaultdict):  # the one mapping of the standard library that wants something else first
        return type(obj)(obj.default_factory, items)
    return type(obj)(items)  # type: ignore[call-arg]


def _is_record(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _names_of(record: Any) -> list[str]:
    """The fields of a dataclass that are set."""
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


def is_nested(data: Any) -> bool:
    """Whether `data` has items of its own: a list, tuple, mapping or dataclass."""
    return isinstance(data, (tuple, list, dict, Mapping)) or _is_record(data)


def items_of(data: Any) -> Iterable[Any]:
    """The items of nested data."""
    if isinstance(data, (tuple, list)):
        return data
    return data.values() if isinstance(data, Mapping) else [getattr(data, name) for name in _names_of(data)]


def map_items(function: Callable[[Any], Any], data: Any) -> Any:
    """Nested data of the same type, with `function` applied to each of its items."""
    if isinstance(data, (tuple, list)):
        return honor_type(data, (function(item) for item in data))
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: function(value) for key, value in data.items()})
    result = copy.copy(data)
    for name in _names_of(data):
        # object.__setattr__ so that frozen dataclasses work too.
        object.__setattr__(result, name, function(getattr(data, name)))
    return result


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of nested data, keeping the structure.

    Args:
        func: called as `func(leaf, *args, **kwargs)`.
        data: nested lists, tuples, named tuples, mappings and dataclasses.
        args: positional arguments for `func`.
        test_type: which leaves `func` is applied to; by default tensors.
        error_on_other_type: raise a TypeError for other leaves; by default they stay as they are.
        kwargs: keyword arguments for `func`.

    Returns:
        The same structure with the results.
    """
    if test_type(data):
        return func(data, *args, **kwargs)

    def inner(item: Any) -> Any:
        return recursively_apply(
            func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )

    if is_nested(data):
        return map_items(inner, data)
    if error_on_other_type:
        wanted, remedy = "tensors", "pass a tensor, as in `torch.tensor(value)`"
        if not isinstance(data, (int, float, complex)) and not hasattr(data, "dtype"):
            remedy = "for other values use `gather_object` or `broadcast_object_list`"
        if test_type is not is_torch_tensor:
            wanted, remedy = f"objects that satisfy {getattr(test_type, '__name__', test_type)}", "convert or remove it"
        raise TypeError(
            f"Found a value of type {type(data).__name__} where only {wanted}, and nested lists, tuples, dicts and "
            f"dataclasses of them, are accepted: {remedy}."
        )
    return data


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def in_words(tensors: list[tuple[str, list[int]]], more: int = 0) -> str:
    """What a rank has brought, for a sentence. tensors: dtype and shape of each. more: how many there are besides."""
    words = [f"{dtype}{shape}" for dtype, shape in tensors] + ([f"{more} more"] if more else [])
    return ", ".join(words) or "nothing"


def leaves(data: Any, error_on_other_type: bool = False) -> list[torch.Tensor]:
    """Every tensor of `data`, in a fixed order. error_on_other_type: raise a TypeError where there is anything else."""
    if isinstance(data, torch.Tensor):
        return [data]
    if (values := _usual_batch(data)) is not None:
        return values
    found: list[torch.Tensor] = []
    recursively_apply(found.append, data, error_on_other_type=error_on_other_type)
    return found


def _usual_batch(data: Any) -> list[torch.Tensor] | None:
    """The tensors of a plain dict, list or tuple that has nothing else: without the cost of walking any nesting."""
    kind = type(data)
    if kind is not dict and kind is not list and kind is not tuple:
        return None
    values = list(data.values() if kind is dict else data)
    return values if all(isinstance(value, torch.Tensor) for value in values) else None


def keys_of(data: Any) -> tuple[str | int, ...]:
    """The keys of all mappings in `data`, in a fixed order; of one that may read differently elsewhere, its type."""
    if isinstance(data, torch.Tensor) or not is_nested(data):
        return ()
    found: Iterable[Any] = data if type(data) is dict or isinstance(data, Mapping) else ()
    keys = [key if isinstance(key, (str, int)) else type(key).__name__ for key in found]
    if _usual_batch(data) is None:
        for item in items_of(data):
            keys += keys_of(item)
    return tuple(keys)


def replace_leaves(data: Any, values: Iterable[torch.Tensor]) -> Any:
    """`data` with its tensors, in the order of `leaves`, replaced by `values`."""
    iterator = iter(values)
    if (usual := _usual_batch(data)) is not None:
        replaced = [next(iterator) for _ in usual]
        return dict(zip(data, replaced, strict=True)) if type(data) is dict else type(data)(replaced)
    return recursively_apply(lambda _: next(iterator), data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Move the tensors of nested data, and every object with a `to` method, to a device.

    Args:
        tensor: the nested data.
        device: the device.
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of mappings whose values stay where they are.

    Returns:
        The same structure on the device.
    """
    return _send(tensor, device, non_blocking, skip_keys, records=True)


def send_arguments_to_device(
    arguments: Any, device: torch.device | str | int, skip_keys: str | list[str] | None = None
) -> Any:
    """As `send_to_device`, for the arguments of a module, which gets dataclasses as they are.

    It may write into them what its caller looks for, or itself at the next call: a copy would lose that.
    """
    return _send(arguments, device, False, skip_keys, records=False)


def _send(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool,
    skip_keys: str | list[str] | None,
    records: bool,
) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    # The usual batches, without the cost of walking any nesting.
    if (type(tensor) is list or type(tensor) is tuple) and all(type(item) is torch.Tensor for item in tensor):
        return type(tensor)([item.to(device, non_blocking=non_blocking) for item in tensor])
    if hasattr(tensor, "to") and not isinstance(tensor, type):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # an object whose `to` knows nothing of non_blocking
            return tensor.to(device)
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, (_send(item, device, non_blocking, skip_keys, records) for item in tensor))
    if isinstance(tensor, Mapping):
        skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
        return honor_mapping(
            tensor,
            {
                key: value if key in skipped else _send(value, device, non_blocking, skip_keys, records)
                for key, value in tensor.items()
            },
        )
    if records and _is_record(tensor):
        return recursively_apply(lambda leaf: leaf.to(device, non_blocking=non_blocking), tensor)
    return tensor


def get_shape(data: Any) -> Any:
    """Replace each tensor of nested data by its shape as a list.

    Args:
        data: the nested data.

    Returns:
        The same structure with the shapes.
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """Replace each tensor of nested data by its shape and dtype.

    Args:
        data: the nested data.

    Returns:
        The same structure with a `TensorInformation` for each tensor.
    """
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create tensors from a description, as `get_data_structure` returns it.

    Args:
        data_structure: the description.

    Returns:
        The same structure with tensors of the right shapes and dtypes and undefined values.
    """
    return recursively_apply(
        lambda info: torch.empty(tuple(info.shape), dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor in nested data.

    Args:
        data: the nested data.

    Raises:
        TypeError: there is no tensor.
    """
    for tensor in leaves(data):
        if tensor.ndim == 0:
            raise TypeError("Cannot tell the batch size from a tensor without dimensions: give it a first dimension.")
        return tensor.shape[0]
    if isinstance(data, (tuple, list, Mapping)) and len(data) == 0:
        raise ValueError(f"Cannot tell the batch size of an empty {type(data).__name__}.")
    raise TypeError(f"Cannot tell the batch size of {a_kind_of(data)} that holds no tensor.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor in nested data, or None if there is none.

    Args:
        data: the nested data.
    """
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data, or None if there is none.

    Args:
        data: the nested data.
    """
    for tensor in leaves(data):
        return tensor.device
    return None


def listify(data: Any) -> Any:
    """Convert each tensor of nested data to a (nested) list of numbers.

    Args:
        data: the nested data.

    Returns:
        The same structure with the lists.
    """

    def as_list(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        # numpy has no bfloat16, and lists of python numbers lose nothing by going through fp32
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).tolist()

    return recursively_apply(as_list, data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Slice every tensor of nested data along its first dimension.

    Args:
        data: the nested data.
        tensor_slice: the slice.
        process_index: not used here; a function given as `slice_fn_for_dispatch` gets the rank.
        num_processes: not used here; a function given as `slice_fn_for_dispatch` gets the number of ranks.

    Returns:
        The same structure with the slices.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate the tensors of several structures that are nested alike.

    Args:
        data: a list of structures. Anything but a tensor can only come alone, and is returned as it is.
        dim: the dimension to concatenate along.

    Returns:
        One structure with the concatenated tensors.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(data, dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[i] for item in data], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([item[key] for item in data], dim=dim) for key in first})
    if _is_record(first):
        result = copy.copy(first)
        for name in _names_of(first):
            values = [getattr(item, name) for item in data]
            object.__setattr__(result, name, concatenate(values, dim) if leaves(values[0]) else values[0])
        return result
    if len(data) == 1:
        return first
    raise TypeError(f"Can only concatenate nested lists, tuples and dicts of tensors, not {type(first).__name__}.")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad tensors with zeros at the end until the batch divides evenly among ranks.

    Args:
        tensor: the nested data.
        batch_size: the size of the batch.
        num_processes: the number of ranks.
        dim: the batch dimension.

    Returns:
        The same structure with the padded tensors.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or leaf.ndim == 0 or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor)


_HALF = (torch.float16, torch.bfloat16)


def _is_half(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _HALF


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the fp16 and bf16 tensors of nested data to fp32.

    Args:
        tensor: the nested data.

    Returns:
        The same structure with the converted tensors.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in _HALF else tensor
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)
