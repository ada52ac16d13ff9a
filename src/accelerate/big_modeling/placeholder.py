"""What stands in a module for a tensor that lies elsewhere.

It shows as a tensor on the meta device: nothing is held in memory. When something is computed with it anyway (by the
parent of its module, say, which does not run the module's hook), the value is brought in for that one computation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accelerate.big_modeling.graphs import outside_graphs
from accelerate.big_modeling.store import FileRange, find_source

Device = int | str | torch.device

# What can be answered without the value: everything that describes a tensor.
_DESCRIPTIONS = {
    getattr(torch.Tensor, name)
    for name in [
        "size",
        "stride",
        "numel",
        "nelement",
        "dim",
        "ndimension",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "storage_offset",
        "data_ptr",
        "untyped_storage",
        "get_device",
        "requires_grad_",
        "register_hook",
        "is_pinned",
        "is_shared",
        "is_inference",
        "retain_grad",
        "__len__",
        "__repr__",
        "__hash__",
        "_is_view",
        "_is_zerotensor",
        "is_conj",
        "is_neg",
        "register_post_accumulate_grad_hook",
    ]
} | {
    torch.is_floating_point,
    torch.is_complex,
    torch.is_conj,
    torch.is_inference,
    torch.is_tensor,
    torch.numel,
    torch._has_compatible_shallow_copy_type,
}
# Attributes that are computed from the value.
_COMPUTED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
# What gives the same tensor again, perhaps in another dtype: put off until it is used.
_SAME = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_CASTS: dict[Any, torch.dtype] = {
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
}
# Methods that change a tensor, besides those whose names end in an underscore.
_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}


class Slot:
    """One tensor of a module that lies elsewhere: where it belongs, and where its value is.

    holder, attribute: the module and the tensor's name in it. weights, name: the mapping that has the value.
    given_device, device: where the module runs, as the caller wrote it and as torch sees it.
    tied: by address and device (as written), tensors that are there anyway because another module shares them.
    """

    def __init__(
        self,
        holder: nn.Module,
        attribute: str,
        weights: Mapping[str, Any],
        name: str,
        given_device: Device | None,
        device: torch.device,
        tied: Mapping[int, Mapping[Any, torch.Tensor]] | None = None,
    ) -> None:
        self.holder = holder
        self.attribute = attribute
        self.weights = weights
        self.name = name
        self.given_device = given_device
        self.device = device
        self.tied = tied
        self.is_parameter = attribute in holder._parameters
        self.table: dict[str, Any] = holder._parameters if self.is_parameter else holder._buffers
        self.placeholder = _stand_in(cast(torch.Tensor, self.table[attribute]), self)
        self.nbytes = self.placeholder.nbytes
        self.table[attribute] = self.placeholder

    def is_empty(self) -> bool:
        tensor = self.table[self.attribute]
        return tensor is self.placeholder or (tensor is not None and tensor.is_meta)

    def fill(self, value: torch.Tensor) -> torch.Tensor:
        """Put a value into the module; returns the tensor that is there now."""
        stand_in = self.table[self.attribute]
        if stand_in is not self.placeholder and isinstance(stand_in, _Offloaded):
            self.placeholder = stand_in  # a cast of the model may have put another one there
        with torch._C.DisableTorchFunctionSubclass():  # the attributes of a placeholder, without a detour
            if value.dtype is not stand_in.dtype:
                value = value.to(stand_in.dtype)
            if self.is_parameter:
                value = nn.Parameter(value, requires_grad=stand_in.requires_grad)
        if len(stand_in.__dict__) > 1 and self.is_parameter:
            value.__dict__.update({key: kept for key, kept in stand_in.__dict__.items() if key != "slot"})
        self.table[self.attribute] = value
        return value

    def clear(self, tensor: torch.Tensor) -> None:
        """Take a tensor out of the module again, unless something else is in its place by now."""
        if self.table.get(self.attribute) is tensor:
            self.table[self.attribute] = self.placeholder

    def source(self) -> torch.Tensor | FileRange:
        """Where the value is: in memory, or in a file."""
        source = find_source(self.weights, self.name)
        if self.tied and isinstance(source, torch.Tensor):
            return self.tied.get(source.data_ptr(), {}).get(self.given_device, source)
        return source

    def host(self) -> torch.Tensor:
        """The value without a copy where possible: as it lies in memory, or mapped from its file."""
        source = find_source(self.weights, self.name)
        return source.mapped() if isinstance(source, FileRange) else source

    def value(self) -> torch.Tensor:
        """The value where the module runs."""
        source = self.source()
        value = source.mapped() if isinstance(source, FileRange) else source.detach()
        return value if value.device == self.device else value.to(self.device)


def _stand_in(tensor: torch.Tensor, slot: Slot) -> Any:
    made: Any
    if isinstance(tensor, nn.Parameter):
        made = OffloadedParameter._around(tensor)
    else:
        made = OffloadedTensor._around(tensor)
    made.slot = slot
    return made


class _Offloaded:
    """The behaviour of both kinds of placeholder. slot: where the value is."""

    slot: Slot

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":
            described = function not in _COMPUTED and function not in _SAME
        else:
            described = name in ("__set__", "__delete__") or function in _DESCRIPTIONS
        if described:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if args and isinstance(args[0], _Offloaded):
            if function in _SAME:
                return args[0]._again(args[0].dtype)  # type: ignore[attr-defined]
            dtype = _cast_to(function, args, kwargs)
            if dtype is not None:
                return args[0]._again(dtype)
            if (name.endswith("_") and not name.endswith("__")) or name in _WRITING:
                return _write(function, args, kwargs)
        args, kwargs = tree_map(_bring, args), tree_map(_bring, kwargs)
        return function(*args, **kwargs)

    def _again(self, dtype: torch.dtype) -> OffloadedTensor:
        """The same value as a tensor that has no part in gradients, in this dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            meta = torch.empty_strided(self.size(), self.stride(), dtype=dtype, device="meta")  # type: ignore[attr-defined]
        made = OffloadedTensor._around(meta)
        made.slot = self.slot
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = cast(Any, type(self))._around(self)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has no use for a place on this machine: it gets the value."""
        tensor = cast(torch.Tensor, self)
        value = self.slot.host().to(tensor.dtype)
        made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return made.__reduce_ex__(protocol)


class OffloadedTensor(_Offloaded, torch.Tensor):
    """A buffer that lies elsewhere, or a value that is put off until it is used."""

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, _meta(tensor), False)


class OffloadedParameter(_Offloaded, nn.Parameter):
    """A parameter that lies elsewhere."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Code that makes a parameter anew in the class of the old one has a value for it: that is a plain one."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        made = torch.Tensor._make_subclass(cls, _meta(tensor), tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@outside_graphs
def _bring(value: Any) -> Any:
    if not isinstance(value, _Offloaded):
        return value
    tensor = cast(torch.Tensor, value)
    brought = value.slot.value().to(tensor.dtype)
    return brought.requires_grad_() if tensor.requires_grad and torch.is_grad_enabled() else brought


def _cast_to(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a call that only changes the dtype."""
    if function in _CASTS and len(args) == 1 and not kwargs:
        return _CASTS[function]
    if function is torch.Tensor.to:
        # torch's own types say that these are never None.
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args[1:], **kwargs)
        device, dtype, _, memory_format = parsed
        if device is None and memory_format is None:
            return dtype or args[0].dtype
    return None


@outside_graphs
def _write(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the value in place, where it lies."""
    offloaded = args[0]
    slot = offloaded.slot
    if not isinstance(find_source(slot.weights, slot.name), torch.Tensor):
        raise RuntimeError(
            f"{slot.name} lies in a file and cannot be changed there by `{function.__name__}`: give the model its new "
            "weights before it is offloaded to disk."
        )
    host = slot.host()
    args, kwargs = tree_map(_bring, args[1:]), tree_map(_bring, kwargs)
    moved = tree_map(lambda value: value.to(host.device) if isinstance(value, torch.Tensor) else value, (args, kwargs))
    with torch.no_grad():
        function(host, *moved[0], **moved[1])
    return offloaded
