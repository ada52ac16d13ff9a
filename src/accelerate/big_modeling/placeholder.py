"""What stands in a module for a tensor that lies elsewhere.

It shows as a tensor on the meta device: nothing is held in memory. When something is computed with it anyway (by the
parent of its module, say, which does not run the module's hook), the value is brought in for that one computation.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accelerate.big_modeling.graphs import outside_graphs
from accelerate.big_modeling.parameters import has_parts, of_kind
from accelerate.big_modeling.store import find_source, full_name

if TYPE_CHECKING:
    from accelerate.big_modeling.slot import Slot

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
_WRITING |= {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Offloaded:
    """The behaviour of both kinds of placeholder.

    slot: where the value is. put_back: the tensor that a module got for good, for those that share it.
    """

    slot: Slot
    put_back: Callable[[], torch.Tensor | None]

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
            if function == _SET_DATA and not _is_cast(args[0], args[1]):
                return _replace(args[0], args[1])
            if function == _IS_META and sys._getframe(1).f_globals is nn.init.__dict__:
                return False  # it would leave the weight as it is
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if args and isinstance(args[0], Offloaded):
            if function in _SAME:
                if sys._getframe(1).f_code is _MAKES_PARAMETER:
                    return args[0]._alike()  # which it insists on: see `_is_param`
                return args[0]._again(args[0].dtype)  # type: ignore[attr-defined]
            if function is torch.Tensor.view_as:  # how nn.init writes to a weight
                return args[0]._again(args[0].dtype, args[1].shape)  # type: ignore[attr-defined]
            dtype = _cast_to(function, args, kwargs)
            if dtype is not None:
                return args[0]._again(dtype)
        written = _written(name, args, kwargs)
        if written:
            return _write(function, written, args, kwargs)
        args, kwargs = tree_map(_bring, args), tree_map(_bring, kwargs)
        return function(*args, **kwargs)

    def _again(self, dtype: torch.dtype, shape: torch.Size | None = None) -> OffloadedTensor:
        """The same value as a tensor that has no part in gradients, in this dtype and shape."""
        with torch._C.DisableTorchFunctionSubclass():
            meta = torch.empty_strided(self.size(), self.stride(), dtype=dtype, device="meta")  # type: ignore[attr-defined]
            meta = meta if shape is None else meta.view(shape)
        made = OffloadedTensor._around(meta)
        made.slot = self.slot
        return made

    def _alike(self) -> Any:
        """Another one of the same class."""
        made = cast(Any, type(self))._around(self)
        made.slot = self.slot
        return made

    @property
    def _is_param(self) -> bool:
        return bool(self.__dict__.get("_is_param", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """`nn.Parameter` sets it on what it has made of a placeholder: a parameter to be trained, so it gets a value.

        Casts of a module may put what they have made in the place of a placeholder, and that remains one.
        """
        self.__dict__["_is_param"] = value
        caller = sys._getframe(1)
        casts = getattr(caller.f_back, "f_globals", None) is nn.modules.module.__dict__
        if caller.f_code is _MAKES_PARAMETER and not casts:
            tensor = cast(torch.Tensor, self)
            made = nn.Parameter(_bring(tensor).detach().clone(), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, made)

    def attributes(self) -> dict[str, Any]:
        """What somebody has noted on the parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in ("slot", "put_back")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = cast(Any, type(self))._around(self)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy({**self.attributes(), "slot": self.slot}, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has no use for a place on this machine: it gets the value."""
        tensor = cast(torch.Tensor, self)
        value = self.slot.host().to(tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            value = of_kind(self.slot.kind or nn.Parameter, value, tensor.requires_grad, self.attributes())
        return value.__reduce_ex__(protocol)


class OffloadedTensor(Offloaded, torch.Tensor):
    """A buffer that lies elsewhere, or a value that is put off until it is used."""

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, _meta(tensor), False)


class OffloadedParameter(Offloaded, nn.Parameter):
    """A parameter that lies elsewhere."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Code that makes a parameter anew in the class of the old one has a value for it: that is a plain one.

        Where that value is a placeholder, a cast one, so is what is made.
        """
        if not isinstance(data, Offloaded):
            return nn.Parameter(data, requires_grad)
        made = cls._around(cast(torch.Tensor, data)).requires_grad_(requires_grad)
        made.slot = data.slot
        return made

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        made = torch.Tensor._make_subclass(cls, _meta(tensor), tensor.requires_grad)
        if not has_parts(type(tensor)):  # which are attributes of it
            made.__dict__.update(tensor.attributes() if isinstance(tensor, Offloaded) else tensor.__dict__)
        return made


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@outside_graphs
def _bring(value: Any) -> Any:
    if not isinstance(value, Offloaded):
        return value
    tensor = cast(torch.Tensor, value)
    brought = value.slot.value().to(tensor.dtype)
    if brought.shape != tensor.shape:
        brought = brought.view(tensor.shape)
    return brought.requires_grad_() if tensor.requires_grad and torch.is_grad_enabled() else brought


def _cast_to(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a call that only changes the dtype."""
    if function in _CASTS and len(args) == 1 and not kwargs:
        return _CASTS[function]
    if function is torch.Tensor.type:
        wanted = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        return wanted if isinstance(wanted, torch.dtype) else None
    if function is torch.Tensor.to:
        if "copy" in kwargs or sum(isinstance(arg, bool) for arg in args) > 1:
            return None  # what it gives is to be written to, say
        # torch's own types say that these are never None.
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args[1:], **kwargs)
        device, dtype, _, memory_format = parsed
        if device is None and memory_format is None:
            return dtype or args[0].dtype
    return None


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The placeholders that a call changes."""
    changed: Any = kwargs.get("out")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITING or kwargs.get("inplace") is True
    if changed is None and in_place:
        changed = args[0] if args else next((kwargs[key] for key in ("tensor", "input", "self") if key in kwargs), None)
    together = changed if isinstance(changed, (list, tuple)) else [changed]
    return [tensor for tensor in together if isinstance(tensor, Offloaded)]


@outside_graphs
def _write(function: Callable[..., Any], written: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change values in place, where they lie."""
    if function is torch.Tensor.copy_ and len(args) > 1 and args[1] is args[0]:
        return args[0]  # it has this value
    hosts = {id(offloaded): _writable(offloaded, function.__name__) for offloaded in written}
    for gpu in {offloaded.slot.device for offloaded in written if offloaded.slot.device.type == "cuda"}:
        torch.cuda.synchronize(gpu)  # copies for earlier forwards may be queued there, and read what is written to
    device = next(iter(hosts.values())).device

    def there(value: Any) -> Any:
        if id(value) in hosts:
            return hosts[id(value)]
        value = _bring(value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        result = function(*tree_map(there, args), **tree_map(there, kwargs))
    given = {id(hosts[id(offloaded)]): offloaded for offloaded in written}
    return tree_map(lambda value: given.get(id(value), value), result)


def _writable(offloaded: Any, how: str) -> torch.Tensor:
    slot: Slot = offloaded.slot
    source = find_source(slot.weights, slot.name)
    if not isinstance(source, torch.Tensor):
        raise RuntimeError(
            f"{full_name(slot.weights, slot.name)} lies in a file and cannot be changed there by `{how}`: give the "
            "model its new weights before it is offloaded to disk."
        )
    return source if source.shape == offloaded.shape else source.view(offloaded.shape)


def _is_cast(offloaded: Any, value: Any) -> bool:
    """Whether what is assigned is the same value, perhaps in another dtype: casts of a module do that."""
    return value.is_meta and value.shape == offloaded.shape and getattr(value, "slot", None) in (None, offloaded.slot)


def _replace(offloaded: Any, value: torch.Tensor) -> None:
    """What `parameter.data = value` does."""
    if value.shape != offloaded.shape or value.dtype != offloaded.dtype:
        name = full_name(offloaded.slot.weights, offloaded.slot.name)
        raise RuntimeError(
            f"The data of {name}, which is offloaded, can be exchanged for some of the same shape and dtype only, "
            f"{tuple(offloaded.shape)} and {offloaded.dtype}, not {tuple(value.shape)} and {value.dtype}: take the "
            "hooks off the model (`remove_hook_from_submodules`) before that, or put a new parameter into its module."
        )
    offloaded.copy_(value)
