"""All XLA devices of a process used as one, and how tensors are sharded over them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

# The axis of the mesh that tensors are cut along; other libraries give it the same name.
AXIS = "fsdp"


def begin() -> None:
    """Take all devices for one from now on, unless one of them is in use: torch_xla would crash later."""
    from accelerate.torch_internals.xla import is_in_use

    if not is_on() and not is_in_use():
        importlib.import_module("torch_xla.runtime").use_spmd()


def is_on() -> bool:
    """Whether all devices are one."""
    return bool(importlib.import_module("torch_xla.runtime").is_spmd())


class Sharding:
    """How tensors are cut over a mesh of devices."""

    def __init__(self, mesh: Any) -> None:
        self._spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        self._model: Any = importlib.import_module("torch_xla.core.xla_model")
        self._mesh = mesh
        self.devices = int(mesh.shape()[AXIS])
        # By the number of dimensions: how a batch is cut on its way to the devices.
        self._batches: dict[int, Any] = {}

    @staticmethod
    def of_all_devices() -> Sharding:
        """Over the mesh that the script has set, if it has the axis, or else over all devices."""
        known = Sharding.in_use()
        if known is not None:
            return known
        spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        count = int(importlib.import_module("torch_xla.runtime").global_runtime_device_count())
        spmd.set_global_mesh(spmd.Mesh(np.arange(count), (count,), (AXIS,)))
        known = Sharding.in_use()
        assert known is not None
        return known

    @staticmethod
    def in_use() -> Sharding | None:
        """That of the mesh of this process, if it has one whose devices share batches."""
        if not is_on():
            return None
        mesh = importlib.import_module("torch_xla.distributed.spmd").get_global_mesh()
        return Sharding(mesh) if mesh is not None and AXIS in (mesh.axis_names or ()) else None

    def cut(self, tensor: torch.Tensor, dimension: int) -> None:
        """Cut a tensor along one dimension."""
        if tensor.ndim:
            self._spmd.mark_sharding(tensor, self._mesh, self._along(tensor.ndim, dimension))

    def cut_like(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Cut a tensor as another one of its shape is cut."""
        from accelerate.torch_internals.xla import cut_along

        dimension = cut_along(other)
        if dimension is not None:
            self.cut(tensor, dimension)

    def cut_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut along the first dimension, where it has a piece for every device."""
        if self._is_batch(tensor) and tensor.device.type == "xla":
            self.cut(tensor, 0)
        return tensor

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of the host on the devices; each gets its piece alone, where there is one for every device."""
        if not self._is_batch(tensor):
            return tensor.to(device)
        how = self._batches.get(tensor.ndim)
        if how is None:
            how = self._batches[tensor.ndim] = self._spmd.ShardingSpec(self._mesh, self._along(tensor.ndim, 0))
        (sent,) = self._model.send_cpu_data_to_device([tensor], device, how)
        placed: torch.Tensor = sent
        return placed

    def separate_backward(self, module: torch.nn.Module) -> None:
        """Keep XLA from joining the backward of a module with others': it would hold all their gradients at once."""
        self._spmd.xla_sharding.apply_backward_optimization_barrier(module)

    def _is_batch(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.ndim and len(tensor) and len(tensor) % self.devices == 0)

    def _along(self, dimensions: int, cut: int) -> tuple[str | None, ...]:
        return tuple(AXIS if dimension == cut else None for dimension in range(dimensions))
