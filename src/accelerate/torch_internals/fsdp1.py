"""FullyShardedDataParallel: the flat parameters that it makes of others, and the gradients that wait in them.

This engine is not developed any further, and has no public way to any of this. Without the names that say where
parameters went, a model cannot be prepared with FSDP version 1; without those that gradients wait under, saving and
loading inside an accumulation window is refused. Version 2 does both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp import ShardingStrategy

from accelerate.torch_internals.missing import gone
from accelerate.torch_internals.modules import BETWEEN_NAMES


def name_before(name: str) -> str:
    """The name of a module or parameter as it was before the model was wrapped."""
    return ".".join(part for part in name.split(".") if part != BETWEEN_NAMES)


def is_hybrid(strategy: ShardingStrategy) -> bool:
    """Whether a strategy keeps copies that are each sharded."""
    return strategy.name.lstrip("_").startswith("HYBRID_SHARD")


def give_mesh(wrapped: nn.Module, mesh: Any) -> None:
    """Have the state dicts of a model hold DTensors, which know how they are spread.

    Where torch has another name for the mesh, those of a model that was wrapped without one hold ShardedTensors.
    """
    module: Any
    for module in Wrapper.fsdp_modules(wrapped):
        if getattr(module, "_device_mesh", mesh) is None and not is_hybrid(module.sharding_strategy):
            module._device_mesh = mesh


def exchanges(wrapped: Any) -> bool:
    """Whether the next backward exchanges gradients; where torch does not tell, yes, which does no harm."""
    return bool(getattr(wrapped, "_sync_gradients", True))


@contextmanager
def exchanging(wrapped: Any) -> Iterator[None]:
    """A context in which the next backward exchanges gradients; `trigger_sync_in_backward` is lost without it."""
    modules: list[Any] = Wrapper.fsdp_modules(wrapped)
    if not all(hasattr(module, "_sync_gradients") for module in modules):
        raise gone(
            "FullyShardedDataParallel._sync_gradients",
            "trigger_sync_in_backward",
            "use FSDP version 2 (fsdp_version=2)",
        )
    before = [module._sync_gradients for module in modules]
    for module in modules:
        module._sync_gradients = True
    try:
        yield
    finally:
        for module, syncs in zip(modules, before, strict=True):
            module._sync_gradients = syncs


class ModuleParameter(NamedTuple):
    """Where a parameter was before it became part of a flat one."""

    module: nn.Module
    name: str


class FlatParameter:
    """One flat parameter.

    parameter: itself. originals: where the model keeps parameters of its own (`use_orig_params`), those, each a view of
    the piece here. places: where each part was; the same for shapes and numels. shared: pairs of places that were one
    parameter. is_sharded: whether there is a piece here, and not all of it. counts: whether the piece here is the one
    that is counted, of those that are the same.
    """

    def __init__(self, module: Any, handle: Any) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)
        self._handle = handle
        flat = handle.flat_param
        self.parameter: Any = flat
        try:
            self.keeps_originals: bool = handle._use_orig_params
            self.originals: list[Any] = list(flat._params or ())
            self.places = [ModuleParameter(info.module, info.param_name) for info in flat._param_infos]
            self.shared = [
                (ModuleParameter(info.prim_module, info.prim_param_name), ModuleParameter(info.module, info.param_name))
                for info in flat._shared_param_infos
            ]
            self.shapes: list[torch.Size] = list(flat._shapes)
            self.numels: list[int] = list(flat._numels)
            self.is_sharded: bool = handle.uses_sharded_strategy
            self.group: Any = handle.process_group
            self.device: torch.device = handle.device
            self.counts = True
            if not self.is_sharded:
                self.counts = dist.get_rank() == 0
            elif is_hybrid(module.sharding_strategy):
                self.counts = dist.get_rank(module._inter_node_pg) == 0
        except AttributeError as error:
            raise _no_version_1(f"FlatParamHandle.{error.name}") from error

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """The piece that belongs here, of something as large as all of it: as large on each process."""
        if not self.is_sharded:
            return full
        ranks = dist.get_world_size(self.group)
        size = -(-full.numel() // ranks)
        padded = torch.nn.functional.pad(full.flatten(), (0, size * ranks - full.numel()))
        return padded[size * dist.get_rank(self.group) :][:size].clone()

    def piece(self, part: int) -> slice:
        """What is here of one part, flattened."""
        try:
            info = self.parameter._shard_param_infos[part]
        except AttributeError as error:
            raise _no_version_1("FlatParameter._shard_param_infos") from error
        return slice(info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else slice(0)

    # --- gradients in the middle of a window --------------------------------------------------------------------

    @property
    def size(self) -> torch.Size:
        """That of all of it. A gradient which waits for the exchange is as large."""
        size: torch.Size = _inside(self.parameter, "_unpadded_unsharded_size")
        return size

    def parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The parts of something as large as all of it, as views."""
        return list(_inside(self._handle, "_get_unflat_views")(full))

    def gradient(self) -> torch.Tensor | None:
        """What has been added up since the last exchange; that of the exchange itself, if nothing has."""
        if self.keeps_originals and all(parameter.grad is None for parameter in self.originals):
            return None  # torch forgets what it has at the next forward
        gradient: torch.Tensor | None = self.parameter.grad
        return gradient

    def unreduced_gradient(self) -> torch.Tensor | None:
        """The gradient of this process alone, which waits for an exchange."""
        gradient = self.gradient()
        return None if gradient is None or gradient.shape != self.size else gradient

    def reduced_gradient(self) -> torch.Tensor | None:
        """The piece here of the gradient that is exchanged already."""
        # Put there by a backward without an exchange after one with it.
        gradient: torch.Tensor | None = getattr(self.parameter, "_saved_grad_shard", None)
        gradient = self.gradient() if gradient is None else gradient
        return None if gradient is None or gradient.shape == self.size else gradient

    def put_gradients(self, reduced: torch.Tensor | None, unreduced: torch.Tensor | None) -> None:
        """Have these gradients, each as large as all of it, and no others. To be called by all processes."""
        flat = self.parameter
        for parameter in (flat, *self.originals):
            parameter.grad = None
        vars(flat).pop("_saved_grad_shard", None)
        if reduced is not None:
            flat.grad = self.shard(reduced)
        if unreduced is not None:
            if flat.grad is not None:
                flat._saved_grad_shard, flat.grad = flat.grad, None
            # While all of the parameter is there, as in a backward without an exchange; torch leaves it there after.
            module: Any = self._module()
            with Wrapper.summon_full_params(module, recurse=False, writeback=False):
                flat.grad = unreduced.to(flat.dtype)
            flat.grad.data = unreduced  # in low precision, as it was
        if self.keeps_originals and (reduced is not None or unreduced is not None):
            as_a_whole = unreduced is not None or not self.is_sharded
            _inside(self._handle, "_use_unsharded_grad_views" if as_a_whole else "_use_sharded_grad_views")()


def flat_parameters(wrapped: nn.Module) -> list[FlatParameter]:
    """Those of a wrapped model."""
    found: list[FlatParameter] = []
    module: Any
    for module in Wrapper.fsdp_modules(wrapped):
        try:
            handle = module._handle
        except AttributeError as error:
            raise _no_version_1("FullyShardedDataParallel._handle") from error
        if handle is not None:
            found.append(FlatParameter(module, handle))
    return found


def _inside(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise gone(
            f"{type(owner).__name__}.{name}",
            "a checkpoint inside an accumulation window under FSDP version 1",
            "save after `optimizer.step()`, or use version 2 (fsdp_version=2)",
        ) from error


def _no_version_1(name: str) -> RuntimeError:
    return gone(name, "FSDP version 1", "use version 2 (fsdp_version=2)")
