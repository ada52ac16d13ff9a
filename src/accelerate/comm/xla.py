"""Several processes with an XLA device each: what is on the devices travels between them, the rest through gloo.

A collective between devices is a part of the graph that is being collected, and every process has to collect the same
one. So what differs between processes (which rank this is, how long its tensor is) never shapes a graph: it is a value
in it, or every process knows all of it beforehand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from accelerate.comm.torch_dist import TorchDistributed

# What XLA reduces as it is; others travel as one of these.
_CARRIERS = {torch.bool: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int32, torch.int16: torch.int32}


class XLACommunicator(TorchDistributed):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._model: Any = importlib.import_module("torch_xla.core.xla_model")
        self._close_step: Callable[[], Any] = importlib.import_module("torch_xla").sync

    def _travels_between_devices(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and not tensor.is_complex()

    def barrier(self) -> None:
        self._close_step()  # as far as this process has come, its work is under way
        super().barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if not self._travels_between_devices(tensor):
            return super().all_reduce(tensor, op)
        carrier = _carried(tensor.detach())
        return _filled(tensor, self._model.all_reduce(op, carrier))

    def average(self, tensors: list[torch.Tensor]) -> None:
        if not tensors:  # of which torch_xla would die
            return
        if all(self._travels_between_devices(tensor) for tensor in tensors):
            self._model.all_reduce("sum", tensors, scale=1.0 / self.size)  # all of them at once
        else:
            super().average(tensors)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if not self._travels_between_devices(tensor):
            return super().broadcast(tensor, source)
        # Not multiplied by zero on the others, who may have what is not finite.
        carrier = _carried(tensor.detach())
        sends = self._sends(self.rank == source)
        return _filled(tensor, self._model.all_reduce("sum", torch.where(sends, carrier, torch.zeros_like(carrier))))

    def _sends(self, yes: bool) -> torch.Tensor:
        """On the device: whether this rank is the one."""
        return torch.tensor([yes, yes]).to(self.device)[0]  # a single number would become a part of the graph

    def _gather_large(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        if not self._travels_between_devices(tensor):
            return super()._gather_large(tensor, sizes)
        longest, rest = max(sizes), tensor.shape[1:]
        if not longest * rest.numel():
            return tensor.new_zeros((sum(sizes), *rest))
        if min(sizes) == longest:
            return self._of_all_ranks(tensor)
        rows = torch.cat([tensor, tensor.new_zeros((longest - len(tensor), *rest))])
        self._close_step()  # what was different up to here is no part of the graph that follows
        everyone = self._of_all_ranks(rows)
        return torch.cat([everyone[rank * longest :][:size] for rank, size in enumerate(sizes)])

    def _of_all_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        everyone: torch.Tensor = self._model.all_gather(_carried(tensor), dim=0)
        return everyone.to(tensor.dtype)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_CARRIERS.get(tensor.dtype, tensor.dtype))


def _filled(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.copy_(content.to(tensor.dtype))
    return tensor
