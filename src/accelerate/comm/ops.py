"""The public collectives: nested data in, nested data out, on whatever communicator this process has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from accelerate.comm.base import current
from accelerate.comm.tree import (
    convert_to_fp32,
    dtype_name,
    in_words,
    keys_of,
    leaves,
    recursively_apply,
    replace_leaves,
)
from accelerate.errors import CannotPadNestedTensorWarning, CannotPickle, DistributedOperationException, a_kind_of, warn

F = TypeVar("F", bound=Callable[..., Any])

# The integers by which a dtype travels in a message.
TENSOR_TYPE_TO_INT = {
    torch.float: 1,
    torch.double: 2,
    torch.half: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def verify_operation(function: F) -> F:
    """Decorate a collective so that debug mode compares its first argument on all ranks before it runs.

    Args:
        function: the collective.

    Returns:
        The decorated function.
    """
    name = function.__name__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        current().verify(name, args[0] if args else next(iter(kwargs.values()), None))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def chained_operation(function: F) -> F:
    """Decorate an operation that is built on collectives, so that their errors name it.

    Args:
        function: the operation.

    Returns:
        The decorated function.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"While running `{function.__name__}`: {error}") from error

    return wrapper  # type: ignore[return-value]


@verify_operation
def gather(tensor: Any) -> Any:
    """Concatenate the tensors of nested data over all ranks along the first dimension.

    Lengths may differ between ranks.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors.

    Returns:
        The same structure with the gathered tensors. On one process, the object itself.
    """
    communicator = current()
    if communicator.size == 1:
        return tensor
    if isinstance(tensor, torch.Tensor):
        return communicator.gather([tensor])[0]
    return replace_leaves(tensor, communicator.gather(leaves(tensor, error_on_other_type=True), keys_of(tensor)))


@verify_operation
def gather_object(object: Any) -> Any:
    """Concatenate lists of picklable objects over all ranks.

    Args:
        object: the list of this rank.

    Returns:
        One list with the objects of all ranks.
    """
    communicator = current()
    if communicator.size == 1:
        return object
    if not _is_like_a_list(object):
        lost = "the keys" if isinstance(object, Mapping) else "the characters" if isinstance(object, str) else ""
        what = f"would keep only {lost} of {a_kind_of(object)}" if lost else f"was given {a_kind_of(object)}"
        raise TypeError(
            f"gather_object joins lists, and {what}: pass it in a list, `gather_object([object])`, to get a list with "
            "one from each process."
        )
    return [item for items in communicator.gather_objects(object) for item in items]


def _is_like_a_list(object: Any) -> bool:
    """Whether it has items that mean the same by themselves, as also an array, or a tensor of values has."""
    if isinstance(object, (Mapping, str, bytes)):
        return False
    try:
        iter(object)  # which tensors without a dimension refuse
    except TypeError:
        return False
    return True


def _holder(tensor: torch.Tensor | None) -> tuple[int, torch.Size, torch.dtype, str]:
    """The first rank that has a tensor, and what kind of tensor it is."""
    infos = current().gather_objects(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device.type))
    for rank, info in enumerate(infos):
        if info is not None:
            return (rank, *info)
    raise ValueError("No process has a tensor to copy: pass it on at least one of them.")


def gather_tensor_shape(tensor: torch.Tensor | None) -> torch.Tensor:
    """Create, on every rank, an empty tensor with the shape and dtype of one that only one rank has.

    Args:
        tensor: the tensor; None on the other ranks.

    Returns:
        The empty tensor.
    """
    _, shape, dtype, _ = _holder(tensor)
    return torch.empty(shape, dtype=dtype)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor that only one rank has to every rank.

    Args:
        tensor: the tensor; None on the other ranks.

    Returns:
        The tensor, on every rank.
    """
    communicator = current()
    rank, shape, dtype, device_type = _holder(tensor)
    if rank != communicator.rank or tensor is None:
        device = getattr(communicator, "device", "cpu") if device_type != "cpu" else "cpu"
        tensor = torch.empty(shape, dtype=dtype, device=device)
    return communicator.broadcast(tensor.contiguous(), rank)


@dataclasses.dataclass
class _Slot:
    """The place of a tensor in data on its way."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def broadcast_data(data: Any, from_process: int = 0) -> Any:
    """The nested data of one process on all of them, whatever the others hold: their tensors are made again."""
    communicator = current()
    if communicator.size == 1:
        return data
    plan = [recursively_apply(lambda tensor: _Slot(tensor.shape, tensor.dtype, tensor.device), data)]
    communicator.broadcast_objects(plan, from_process)
    if communicator.rank == from_process:
        for tensor in leaves(data):
            communicator.broadcast(tensor.detach().contiguous(), from_process)
        return data

    def receive(slot: _Slot) -> torch.Tensor:
        device = getattr(communicator, "device", slot.device) if slot.device.type != "cpu" else slot.device
        return communicator.broadcast(torch.empty(slot.shape, dtype=slot.dtype, device=device), from_process)

    return recursively_apply(receive, plan[0], test_type=lambda item: isinstance(item, _Slot))


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast the tensors of nested data from one rank.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors, with the same shapes on all ranks.
        from_process: the rank whose tensors are sent.

    Returns:
        The same structure with the tensors of that rank.
    """
    communicator = current()
    if communicator.size == 1:
        return tensor
    # A rank whose tensor has another size would be left with a part of what is sent, or wait for more.
    mine = [(dtype_name(leaf), list(leaf.shape)) for leaf in leaves(tensor, error_on_other_type=True)]
    everyone = communicator.gather_objects(mine)
    if len({str([(dtype, math.prod(shape)) for dtype, shape in theirs]) for theirs in everyone}) > 1:
        raise DistributedOperationException(
            "Cannot broadcast tensors whose dtypes or shapes differ between ranks: "
            + "; ".join(f"rank {rank} has {in_words(theirs)}" for rank, theirs in enumerate(everyone))
            + ". Pass the same dtypes and shapes on every rank, or use `broadcast_object_list`."
        )
    return recursively_apply(communicator.broadcast, tensor, from_process, error_on_other_type=True)


@verify_operation
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast a list of picklable objects from one rank, in place.

    Args:
        object_list: a list of the same length on all ranks.
        from_process: the rank whose objects are sent.

    Returns:
        The list.
    """
    current().broadcast_objects(object_list, from_process)
    return object_list


@verify_operation
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce each tensor of nested data over all ranks.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors.
        reduction: "sum", "mean", "max", or "none" to copy without reducing.
        scale: a factor for devices whose reduction takes one (XLA); it has no effect elsewhere.

    Returns:
        The same structure with the reduced tensors, the same on every rank.
    """
    if reduction not in ("mean", "sum", "max", "none"):
        raise ValueError(f"reduction is {reduction!r}: choose 'mean', 'sum', 'max' or 'none'.")
    communicator = current()

    def reduce_one(leaf: torch.Tensor) -> torch.Tensor:
        result = leaf.detach().clone(memory_format=torch.contiguous_format)
        if communicator.size == 1 or reduction == "none":
            return result
        communicator.all_reduce(result, "max" if reduction == "max" else "sum")
        return result / communicator.size if reduction == "mean" else result

    return recursively_apply(reduce_one, tensor, error_on_other_type=True)


@chained_operation
@verify_operation
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad the tensors of nested data to the largest size over all ranks.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors.
        dim: the dimension to pad.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.

    Returns:
        The same structure with the padded tensors.
    """
    communicator = current()
    tensors = leaves(tensor, error_on_other_type=True)
    if any(leaf.is_nested for leaf in tensors):
        warn(
            "Nested tensors cannot be padded across processes: they are returned as they are.",
            CannotPadNestedTensorWarning,
        )
    if communicator.size == 1:
        return tensor
    padded_dims = [dim if -leaf.ndim <= dim < leaf.ndim and not leaf.is_nested else None for leaf in tensors]
    mine = torch.tensor([0 if d is None else leaf.shape[d] for leaf, d in zip(tensors, padded_dims, strict=True)])
    longest = communicator.gather([mine[None]], keys_of(tensor))[0].amax(dim=0).tolist()

    def pad(leaf: torch.Tensor, size: int, padded_dim: int | None) -> torch.Tensor:
        if padded_dim is None or leaf.shape[padded_dim] == size:
            return leaf
        shape = list(leaf.shape)
        shape[padded_dim] = size
        out = leaf.new_full(shape, pad_index)
        start = size - leaf.shape[padded_dim] if pad_first else 0
        out.narrow(padded_dim, start, leaf.shape[padded_dim]).copy_(leaf)
        return out

    return replace_leaves(tensor, [pad(*each) for each in zip(tensors, longest, padded_dims, strict=True)])


class ConvertOutputsToFp32:
    """A forward function whose fp16 and bf16 outputs are converted to fp32.

    Args:
        model_forward: the original forward function.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise CannotPickle(
            "A prepared model's forward cannot be pickled: unwrap it first with "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a forward function whose fp16 and bf16 outputs are converted to fp32.

    The result is a plain function, so it can be a method.

    Args:
        model_forward: the original forward function.

    Returns:
        The new function.
    """
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def GatheredParameters(
    params: Iterable[torch.nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather parameters that DeepSpeed has partitioned (ZeRO stage 3) while the block runs.

    Other parameters are unaffected.

    Args:
        params: the parameters.
        modifier_rank: the rank whose changes are kept when the block ends; None discards changes.
        fwd_module: the module whose forward uses the parameters, for DeepSpeed.
        enabled: False does nothing.
    """
    params = list(params) if isinstance(params, Iterable) else [params]
    if not any(hasattr(param, "ds_id") for param in params):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
        yield
