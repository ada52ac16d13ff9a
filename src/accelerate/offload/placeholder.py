"""The placeholder of an offloaded tensor in its module.

It looks like a tensor on the meta device, and holds no data. If something computes with it anyway (the parent of its
module, say, without running the module's hook), the value is copied in for that one computation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accelerate.comm.tree import recursively_apply
from accelerate.devices import copies_behind
from accelerate.offload.offloaded_weights import find_source, full_name
from accelerate.offload.parameter_kinds import has_parts, of_kind
from accelerate.torch_internals.compile import outside_graphs
from accelerate.torch_internals.offloaded_tensors import BecomesParameter, describing_functions

if TYPE_CHECKING:
    from accelerate.offload.slot import Slot

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
    *describing_functions(),
}
# Attributes that are computed from the value.
_COMPUTED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
# What gives the same tensor again, perhaps in another dtype: put off until it is used.
_DETACH = {torch.Tensor.detach, torch.detach}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
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
# Runs a function of torch on what a placeholder is to torch: an empty tensor on the meta device.
_as_meta: Callable[..., Any] = nn.Parameter.__torch_function__
# Functions of nn.init that leave a tensor of the meta device alone, where the others let it decide.
_INITIALISERS = ("trunc_normal_", "dirac_", "orthogonal_", "sparse_")
_WRITING_INITIALISERS: dict[str, Callable[..., torch.Tensor]] = {}  # what is there instead, by name
# Whether a module is being cast in this thread.
_CASTING: ContextVar[bool] = ContextVar("casting", default=False)


class Offloaded(BecomesParameter):
    """The behavior of both kinds of placeholder.

    slot: where the value is. put_back: the tensor that replaced it for good, for modules that share it.
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
            described = function not in _COMPUTED and function != _DATA
        else:
            described = name in ("__set__", "__delete__") or function in _DESCRIPTIONS
        if described:
            if function == _SET_DATA and not _is_cast(args[0], args[1]):
                return _replace(args[0], args[1])
            return _as_meta(function, types, args, kwargs)
        if args and isinstance(args[0], Offloaded):
            if function in _DETACH:
                return args[0]._detached()
            if function == _DATA:
                return args[0]._again(args[0].dtype)  # type: ignore[attr-defined]
            if function is torch.Tensor.view_as:  # how nn.init writes to a weight
                return args[0]._again(args[0].dtype, args[1].shape)  # type: ignore[attr-defined]
            dtype = _cast_to(function, args, kwargs)
            if dtype is not None:
                return args[0]._again(dtype)
        written = _written(name, args, kwargs)
        if written:
            return _write(function, written, args, kwargs)
        args, kwargs = _brought_in(args), _brought_in(kwargs)
        return function(*args, **kwargs)

    @outside_graphs
    def _again(self, dtype: torch.dtype, shape: torch.Size | None = None) -> OffloadedTensor:
        """A placeholder for the same value, detached, in this dtype and shape."""
        meta = _meta(cast(torch.Tensor, self), dtype)
        made = OffloadedTensor._around(meta if shape is None else meta.view(shape))
        made.slot = self.slot
        return made

    @outside_graphs
    def _detached(self) -> Any:
        """A detached placeholder for the same value, of the same class, as `nn.Parameter` requires."""
        made = cast(Any, type(self))._without_gradients(cast(torch.Tensor, self))
        made.slot = self.slot
        return made

    def became_parameter(self) -> None:
        """Called if `nn.Parameter` was given a placeholder: the parameter is to be trained, so it gets a value.

        A parameter that a cast of a module creates stays a placeholder.
        """
        if not _CASTING.get():
            tensor = cast(torch.Tensor, self)
            made = nn.Parameter(_bring(tensor).detach().clone(), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, made)

    def attributes(self) -> dict[str, Any]:
        """The attributes that were set on the parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in ("slot", "put_back")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = cast(Any, type(self))._around(self)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy({**self.attributes(), "slot": self.slot}, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the value, since a location on this machine means nothing elsewhere."""
        tensor = cast(torch.Tensor, self)
        value = self.slot.host().to(tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            value = of_kind(self.slot.kind or nn.Parameter, value, tensor.requires_grad, self.attributes())
        return value.__reduce_ex__(protocol)


class OffloadedTensor(Offloaded, torch.Tensor):
    """An offloaded buffer, or a value that is materialized when it is used."""

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        return _meta(tensor).as_subclass(cls)

    _without_gradients = _around


class OffloadedParameter(Offloaded, nn.Parameter):
    """An offloaded parameter."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Code that recreates a parameter in the class of the old one has a value for it, and gets a plain parameter.

        If that value is a placeholder, as after a cast, the result is one, too.
        """
        if not isinstance(data, Offloaded):
            return nn.Parameter(data, requires_grad)
        made = cls._around(cast(torch.Tensor, data)).requires_grad_(requires_grad)
        made.slot = data.slot
        return made

    @classmethod
    def _around(cls, tensor: torch.Tensor) -> Any:
        made = nn.Parameter.__new__(cls, _meta(tensor), tensor.requires_grad)
        if not has_parts(type(tensor)):  # which are attributes of it
            made.__dict__.update(tensor.attributes() if isinstance(tensor, Offloaded) else tensor.__dict__)
        return made

    @classmethod
    def _without_gradients(cls, tensor: torch.Tensor) -> Any:
        return nn.Parameter.__new__(cls, _meta(tensor), False)


def placeholder_for(tensor: torch.Tensor, slot: Slot) -> Any:
    """The placeholder of a tensor."""
    made = (OffloadedParameter if isinstance(tensor, nn.Parameter) else OffloadedTensor)._around(tensor)
    made.slot = slot
    _let_initializers_write()
    return made


def traits_of(placeholder: torch.Tensor) -> tuple[torch.dtype, bool]:
    """The dtype of a placeholder and whether it requires gradients, without a dispatch for each."""
    traits: tuple[torch.dtype, bool] = _as_meta(_traits, (), (placeholder,), {})
    return traits


def _traits(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
    return tensor.dtype, tensor.requires_grad


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


@contextlib.contextmanager
def casting() -> Iterator[None]:
    """A context in which a module is cast: parameters that are made of placeholders stay placeholders."""
    token = _CASTING.set(True)
    try:
        yield
    finally:
        _CASTING.reset(token)


def _let_initializers_write() -> None:
    """Have the functions of nn.init write to placeholders, which they would otherwise take for empty."""
    for name in _INITIALISERS:
        function = getattr(nn.init, name, None)
        if function is not None and function is not _WRITING_INITIALISERS.get(name):
            _WRITING_INITIALISERS[name] = made = _writing(function)
            setattr(nn.init, name, made)


def _writing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Offloaded):
            return _write(function, [tensor], (tensor, *args), kwargs)
        return function(tensor, *args, **kwargs)

    return initialize


def _brought_in(values: Any) -> Any:
    return recursively_apply(_bring, values, test_type=_is_offloaded)


def _is_offloaded(value: Any) -> bool:
    return isinstance(value, Offloaded)


@outside_graphs
def _bring(value: Any) -> Any:
    tensor: torch.Tensor = value
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
        flags = [arg for arg in args[1:] if isinstance(arg, bool)]
        if "copy" in kwargs or len(flags) > 1:
            return None  # what it gives is to be written to, say
        given = [arg for arg in args[1:] if arg is not None and not isinstance(arg, (bool, torch.dtype))]
        given += [value for key, value in kwargs.items() if key not in ("dtype", "non_blocking") and value is not None]
        if not given:  # neither a device nor a tensor that is on one, nor another order of memory
            dtypes = [value for value in (*args[1:], kwargs.get("dtype")) if isinstance(value, torch.dtype)]
            return dtypes[0] if dtypes else args[0].dtype
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
    """Change values in place, where they are stored."""
    if function is torch.Tensor.copy_ and len(args) > 1 and args[1] is args[0]:
        return args[0]  # it has this value
    hosts = {id(offloaded): _writable(offloaded, function.__name__) for offloaded in written}
    for gpu in {offloaded.slot.device for offloaded in written if copies_behind(offloaded.slot.device)}:
        torch.accelerator.synchronize(
            gpu
        )  # copies for earlier forwards may be queued there, and read what is written to
    device = next(iter(hosts.values())).device

    def there(value: Any) -> Any:
        if id(value) in hosts:
            return hosts[id(value)]
        return (_bring(value) if _is_offloaded(value) else value).to(device)

    with torch.no_grad():
        result = function(*recursively_apply(there, args), **recursively_apply(there, kwargs))
    given = {id(hosts[id(offloaded)]): offloaded for offloaded in written}
    return recursively_apply(lambda value: given.get(id(value), value), result)


def _writable(offloaded: Any, how: str) -> torch.Tensor:
    slot: Slot = offloaded.slot
    source = find_source(slot.weights, slot.name)
    if not isinstance(source, torch.Tensor):
        raise RuntimeError(
            f"{full_name(slot.weights, slot.name)} is offloaded to a file, so `{how}` cannot change it: change the "
            "weights before you offload the model to disk."
        )
    return source if source.shape == offloaded.shape else source.view(offloaded.shape)


def _is_cast(offloaded: Any, value: Any) -> bool:
    """Whether the assigned value is the same one, perhaps in another dtype, as casts of a module assign."""
    return value.is_meta and value.shape == offloaded.shape and getattr(value, "slot", None) in (None, offloaded.slot)


def _replace(offloaded: Any, value: torch.Tensor) -> None:
    """What `parameter.data = value` does."""
    if value.shape != offloaded.shape or value.dtype != offloaded.dtype:
        name = full_name(offloaded.slot.weights, offloaded.slot.name)
        raise RuntimeError(
            f"{name} is offloaded, so its data can only be replaced by data of the same shape and dtype, "
            f"{tuple(offloaded.shape)} and {offloaded.dtype}, not {tuple(value.shape)} and {value.dtype}: remove the "
            "model's hooks first (`remove_hook_from_submodules`), or assign a new parameter to its module."
        )
    offloaded.copy_(value)
