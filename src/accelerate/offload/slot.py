"""Where an offloaded tensor belongs in its module, and where its value is."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn

from accelerate.devices.base import DeviceLike
from accelerate.io.stored_tensors import FileRange
from accelerate.offload.module_tensors import Form, form_of, shared_on
from accelerate.offload.offloaded_weights import find_source, full_name
from accelerate.offload.parameter_kinds import PLAIN, has_parts, is_packed, of_kind
from accelerate.offload.placeholder import Offloaded, placeholder_for, traits_of
from accelerate.torch_internals.modules import buffers_of, parameters_of
from accelerate.torch_internals.offloaded_tensors import version_of


class Slot:
    """An offloaded tensor of a module: where it belongs, and where its value is.

    holder, attribute: the module and the tensor's name in it. weights, name: the mapping with the value, and its key.
    given_device, device: where the module runs, as the caller wrote it and as torch reports it.
    tied: by address, then by device (as written), tensors that another module already has there.
    """

    def __init__(
        self,
        holder: nn.Module,
        attribute: str,
        weights: Mapping[str, Any],
        name: str,
        given_device: DeviceLike | None,
        device: torch.device,
        tied: Mapping[int, Mapping[Any, torch.Tensor]] | None = None,
    ) -> None:
        self.holder = holder
        self.attribute = attribute
        self.weights = weights
        self.name = name
        self.given_device = given_device
        self.device = device
        self.home = device  # where the tensor was before it was offloaded
        self.is_parameter: bool = attribute in parameters_of(holder)
        # By device: tensors of others that are this one. Found now, since later something else may have its address.
        source = find_source(weights, name) if tied and self.is_parameter else None
        self.shared: Mapping[Any, torch.Tensor] = {}
        self.form: Form | None = None  # of the value, if it may be shared
        if tied and isinstance(source, torch.Tensor):
            self.shared, self.form = tied.get(source.data_ptr(), {}), form_of(source)
        table: Any = parameters_of(holder) if self.is_parameter else buffers_of(holder)
        self.table: MutableMapping[str, Any] | _Scripted = (
            table if isinstance(table, MutableMapping) else _Scripted(table)
        )
        tensor = cast(torch.Tensor, self.table[attribute])
        # The class of a tensor that is not a plain one, and its strides where it does not lie row by row.
        self.kind: type[torch.Tensor] | None = _kind_of(tensor)
        self.placeholder = placeholder_for(tensor, self)
        self.placeholder_type: type[torch.Tensor] = type(self.placeholder)
        self.strides: tuple[int, ...] | None = _unusual_strides(self.placeholder)
        self.nbytes: Any = self.placeholder.nbytes
        self.table[attribute] = self.placeholder
        # What the copy that is on its way is made of, with its version then: see `take`.
        self._taken: torch.Tensor | None = None
        self._version: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        memo[id(self)] = made = Slot.__new__(Slot)
        made.__dict__.update(copy.deepcopy({**self.__dict__, "_taken": None}, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Pickled together with its placeholder, which becomes a tensor with the value."""
        kind = self.kind or (nn.Parameter if self.is_parameter else torch.Tensor)
        changed = {"weights": {self.name: self.placeholder}, "stand_in": kind, "shared": {}, "_taken": None}
        own = {name: value for name, value in self.__dict__.items() if name != "placeholder_type"}
        return {**own, **changed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.placeholder_type = self.__dict__.pop("stand_in")  # its name in pickles

    def is_empty(self) -> bool:
        tensor = self.table.get(self.attribute)  # pruning and its likes take a parameter away
        # `torch.utils.swap_tensors` makes another tensor of the same object.
        if tensor is self.placeholder and type(tensor) is self.placeholder_type:
            return True
        if tensor is None or not tensor.is_meta:
            return False
        if isinstance(tensor, Offloaded) and tensor.slot not in (self, getattr(self.placeholder, "slot", self)):
            return False  # the module was offloaded again, with other weights: those count
        if tensor.shape != self.placeholder.shape:
            refuse_values({self.name: tensor}, self.weights)
        return True

    def fill(self, value: torch.Tensor, gradients: bool = True) -> torch.Tensor:
        """Put a value into the module. Returns the tensor that is there now. gradients: whether it may require them."""
        placeholder = self.table[self.attribute]
        if placeholder is not self.placeholder and isinstance(placeholder, Offloaded):
            self.placeholder = placeholder  # a cast of the model may have put another one there
        dtype, requires_grad = traits_of(placeholder)
        requires_grad = gradients and requires_grad
        if value.dtype is not dtype:
            value = value.to(dtype)
        if self.strides is not None and value.stride() != self.strides:
            value = value.new_empty_strided(value.shape, self.strides).copy_(value.detach())
        if self.is_parameter and self.kind is None:
            value = nn.Parameter(value, requires_grad=requires_grad)
        if self.is_parameter and (len(placeholder.__dict__) > 1 or self.kind is not None):
            # In a module that was unpickled a plain parameter stands in.
            attributes = placeholder.attributes() if isinstance(placeholder, Offloaded) else dict(placeholder.__dict__)
            if self.kind is None:
                value.__dict__.update(attributes)
            else:
                known = type(value) is not torch.Tensor or has_parts(self.kind) or issubclass(self.kind, nn.Parameter)
                if not known:
                    value = value.as_subclass(self.kind)  # files know no classes
                value = of_kind(self.kind, value, requires_grad, attributes)
        self.table[self.attribute] = value
        return value

    def clear(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its placeholder again, unless the module has another tensor by now."""
        if self.table.get(self.attribute) is tensor:
            self.table[self.attribute] = self.placeholder

    def put_back(self, device: torch.device) -> None:
        """Give the module its value for good, on a device. Names that share a placeholder will share the value."""
        tensor = self.table.get(self.attribute)
        if tensor is None or tensor.shape != self.placeholder.shape or not self.is_empty():
            return
        known = self.placeholder.__dict__.get("put_back")  # a weak one, by another name of it
        shared = None if known is None else known()
        if shared is not None and shared.device == device:
            self.table[self.attribute] = shared
        else:
            self.placeholder.put_back = weakref.ref(self.fill(self.host().detach().to(device)))

    def source(self) -> torch.Tensor | FileRange:
        """Where the value is: in memory, or in a file."""
        shared = shared_on(self.given_device, self.shared, self.form) if self.shared else None
        return find_source(self.weights, self.name) if shared is None else shared

    def take(self) -> torch.Tensor | FileRange:
        """The source, for a copy that is used later; see `is_outdated`."""
        source = self.source()
        self._taken = source if isinstance(source, torch.Tensor) else None
        self._version = None if self._taken is None else version_of(self._taken)
        return source

    def is_outdated(self) -> bool:
        """Whether a copy of what was taken last is stale: it was written to or replaced."""
        if self._taken is not None and version_of(self._taken) != self._version:
            return True
        return self.table.get(self.attribute) is not self.placeholder

    def host(self) -> torch.Tensor:
        """The value on the host, without a copy if possible: the tensor in memory, or mapped from its file."""
        source = find_source(self.weights, self.name)
        return source.mapped() if isinstance(source, FileRange) else source

    def value(self) -> torch.Tensor:
        """The value on the module's device."""
        source = self.source()
        value = source.mapped() if isinstance(source, FileRange) else source.detach()
        return value if value.device == self.device else value.to(self.device)


class _Scripted:
    """The parameters or buffers of a TorchScript module, with the methods of a dict that are needed here."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._table[name] = tensor

    def get(self, name: str) -> Any:
        return self._table[name]


def refuse_values(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> None:
    """Raise if the value for a tensor has another shape. Names without a value are ignored."""
    wrong = []
    for name, tensor in tensors.items():
        try:
            source = find_source(weights, name)
        except KeyError:
            continue
        if source.shape != tensor.shape and not is_packed(tensor):
            shapes = f"has shape {tuple(tensor.shape)}, but its value has shape {tuple(source.shape)}"
            wrong.append(f"{full_name(weights, name)} {shapes}")
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: offload a model with weights of the same shapes.")


def _kind_of(tensor: torch.Tensor) -> type[torch.Tensor] | None:
    if isinstance(tensor, Offloaded):
        return tensor.slot.kind
    return None if type(tensor) in PLAIN or not isinstance(tensor, nn.Parameter) else type(tensor)


def _unusual_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor that is not in the usual memory order."""
    strides, empty = tensor.stride(), torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return None if empty.is_contiguous() or torch.empty_like(empty).stride() != strides else strides
