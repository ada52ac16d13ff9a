"""Giving a model that is spread over processes the weights that one of them has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.parallel.shards import local, piece_of
from accelerate.torch_internals.modules import apply_to_tensors, buffers_of, parameters_of


def take(
    model: nn.Module, dtype: torch.dtype | None = None, also: Container[nn.Parameter] = ()
) -> dict[str, torch.Tensor]:
    """Leave the model with parameters that have no memory, and return their values: on rank 0, nothing elsewhere.

    dtype: what the parameters that are trained have afterwards, and the others in `also`, if they are less precise.
    """
    values: dict[str, torch.Tensor] = {}
    first = dist.get_rank() == 0
    made: dict[int, nn.Parameter] = {}  # a parameter with two names stays one
    for prefix, module in model.named_modules():
        for key, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                cast = (parameter.requires_grad or parameter in also) and parameter.is_floating_point()
                kept = torch.promote_types(parameter.dtype, dtype) if cast and dtype else parameter.dtype
                # Rows one after the other, whatever the layout was: only such ones can be cut.
                empty = torch.empty(parameter.shape, device="meta", dtype=kept)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
                if first:
                    values[f"{prefix}.{key}" if prefix else key] = parameter.detach()
            parameters_of(module)[key] = made[id(parameter)]
    return values


def give(
    model: nn.Module, values: dict[str, torch.Tensor], device: torch.device, shards_on: torch.device | None = None
) -> None:
    """Hand out the values of rank 0, tensor by tensor, each process keeping its piece.

    shards_on: where pieces lie, if not on the device.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            place = shards_on or device
            return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()

    with torch.no_grad():
        apply_to_tensors(model, allocate)
        for name, parameter in model.named_parameters():
            full = _from_rank_0(parameter, values.pop(name, None), device)
            local(parameter).copy_(piece_of(full, parameter))
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def _from_rank_0(like: torch.Tensor, value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The value that rank 0 has, on all processes; whatever memory holds, where it has none either."""
    full = torch.empty(like.shape, dtype=like.dtype, device=device)
    if value is not None and not value.is_meta:
        full.copy_(value)
    dist.broadcast(full, 0)
    return full


def _first_has_none(values: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Whether the parameters of rank 0 have no memory either."""
    answer = torch.tensor(int(any(value.is_meta for value in values.values())), device=device)
    dist.broadcast(answer, 0)
    return bool(answer)


class Filling:
    """Gives modules their values, one at a time: called with each of a model's, in the same order on all processes."""

    def __init__(
        self,
        model: nn.Module,
        values: dict[str, torch.Tensor],
        device: torch.device,
        make: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """make: gives the parameters of a module their memory and values, where rank 0 has none."""
        self._device = device
        self._values = values
        self._make = make if make is not None and _first_has_none(values, device) else None
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Not kept alive: a whole parameter must go as soon as it is cut into pieces.
        self._filled: dict[int, weakref.ref[nn.Parameter]] = {}
        self._empty = list(model.parameters())
        for module in model.modules():
            for key, buffer in buffers_of(module).items():
                if buffer is not None:
                    here = None if buffer.is_meta else buffer
                    buffers_of(module)[key] = _from_rank_0(buffer, here, device)

    def __call__(self, module: nn.Module) -> None:
        empty = {key: p for key, p in parameters_of(module).items() if p is not None and p.is_meta}
        if empty and self._make is not None:
            self._make(module)
            if dist.get_rank() == 0:
                made = {self._names[id(p)]: parameters_of(module)[key] for key, p in empty.items()}
                self._values |= {name: p.detach() for name, p in made.items() if p is not None}
        for key, parameter in empty.items():
            name = self._names[id(parameter)]
            filled = self._filled[id(parameter)]() if id(parameter) in self._filled else None
            if filled is None:
                with torch.no_grad():
                    full = _from_rank_0(parameter, self._values.pop(name, None), self._device)
                filled = nn.Parameter(full, requires_grad=parameter.requires_grad)
                filled.__dict__.update(parameter.__dict__)
                self._filled[id(parameter)] = weakref.ref(filled)
            parameters_of(module)[key] = filled


def follow_rank_0(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """The weights of rank 0, whole, on all processes; what is spread already stays as it is.

    dtype: what the parameters that are trained have afterwards, if they are less precise.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if dtype and tensor.requires_grad and tensor.is_floating_point() and not isinstance(tensor, DTensor):
            tensor = tensor.to(torch.promote_types(tensor.dtype, dtype))
        if type(tensor) in (torch.Tensor, nn.Parameter):
            tensor = tensor.contiguous()  # only such ones can be sent, and cut
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    with torch.no_grad():
        apply_to_tensors(model, allocate)
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                dist.broadcast(tensor.data, 0)


def copy_rank_0(model: nn.Module, device: torch.device) -> None:
    """The weights of rank 0 on all processes, without moving the model to the device."""
    with torch.no_grad():
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        for tensor in tensors:
            copy = tensor.data.to(device)
            dist.broadcast(copy, 0)
            if copy is not tensor.data:
                tensor.data.copy_(copy)
