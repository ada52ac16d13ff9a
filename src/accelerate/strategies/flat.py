"""Where the parameters of a model are in the flat ones of FSDP version 1, for optimizers and norms."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp import ShardingStrategy

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Flat:
    """The flat parameters of one wrapped model."""

    def __init__(self, wrapped: Wrapper, before: dict[tuple[int, str], torch.Tensor], names: dict[int, str]) -> None:
        """before: the parameters that the model had, by module and name. names: what it called them, in its order."""
        self._order = list(names.values())
        # What the model called the parts of each parameter that it has now.
        self._names: dict[int, list[str]] = {}
        self._counts: dict[int, bool] = {}
        # For each old parameter, by its number: itself, which must not be kept alive, and its place in a flat one.
        self._homes: dict[int, tuple[weakref.ref[Any], Any, int]] = {}
        for module in Wrapper.fsdp_modules(wrapped):
            handle = module._handle
            if handle is not None:
                self._add(module, handle, before, names)

    def _add(
        self, module: Any, handle: Any, before: dict[tuple[int, str], torch.Tensor], names: dict[int, str]
    ) -> None:
        flat = handle.flat_param
        counts = True
        if handle._sharding_strategy == ShardingStrategy.NO_SHARD or not handle.uses_sharded_strategy:
            counts = dist.get_rank() == 0
        elif module.sharding_strategy in _HYBRID:
            counts = dist.get_rank(module._inter_node_pg) == 0
        olds = [before[id(info.module), info.param_name] for info in flat._param_infos]
        for parameter in [flat, *(flat._params or ())]:
            self._counts[id(parameter)] = counts
        self._names[id(flat)] = [names[id(old)] for old in olds]
        for parameter, name in zip(flat._params or (), self._names[id(flat)], strict=False):
            self._names[id(parameter)] = [name]
        for place, old in enumerate(olds):
            self._homes[id(old)] = (weakref.ref(old), handle, place)

    def _home(self, parameter: torch.Tensor) -> tuple[Any, int] | None:
        """The handle of the flat parameter that this one became part of, and its place there."""
        old, handle, place = self._homes.get(id(parameter), (None, None, 0))
        return None if old is None or old() is not parameter else (handle, place)

    def counts(self, parameter: torch.Tensor) -> bool | None:
        """Whether this process counts its piece of a parameter; None if the parameter is not of this model."""
        return self._counts.get(id(parameter))

    def names(self, parameters: list[torch.Tensor]) -> list[str]:
        """What the model called these parameters, in its order where they are flat."""
        found = [name for parameter in parameters for name in self._names.get(id(parameter), ())]
        flat = any(len(self._names.get(id(parameter), ())) > 1 for parameter in parameters)
        return sorted(found, key=self._order.index) if flat else found

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the flat parameters, and the pieces of the state that it had for the whole ones."""
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        homes = [home for parameter in listed if (home := self._home(parameter)) is not None]
        if not homes:
            return
        if homes[0][0]._use_orig_params:
            self._replace(optimizer)
        else:
            self._flatten(optimizer)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Where the model keeps parameters of its own: each is a piece of the old one."""
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                home = self._home(old)
                if home is not None:
                    handle, place = home
                    new = group["params"][index] = handle.flat_param._params[place]
                    if old in optimizer.state:
                        optimizer.state[new] = _cut(optimizer.state.pop(old), handle, place)

    def _flatten(self, optimizer: torch.optim.Optimizer) -> None:
        chosen: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            kept: list[torch.Tensor] = []
            for parameter in group["params"]:
                home = self._home(parameter)
                if home is None:
                    kept.append(parameter)
                    continue
                handle, place = home
                flat = handle.flat_param
                if chosen.setdefault(id(flat), number) != number:
                    raise ValueError(
                        f"The optimizer has {flat._fqns[place]} in another group than parameters that FSDP version 1 "
                        "flattens together with it: pass use_orig_params=True, or use version 2."
                    )
                if not any(flat is one for one in kept):
                    kept.append(flat)
            group["params"][:] = kept
        self._flatten_state(optimizer)

    def _flatten_state(self, optimizer: torch.optim.Optimizer) -> None:
        states: dict[int, dict[int, Any]] = {}
        handles: dict[int, Any] = {}
        for old in list(optimizer.state):
            home = self._home(old)
            if home is None:
                continue
            handle, place = home
            handles[id(handle)] = handle
            states.setdefault(id(handle), {})[place] = optimizer.state.pop(old)
        for number, pieces in states.items():
            handle = handles[number]
            flat = handle.flat_param
            first = next(iter(pieces.values()))
            merged = {}
            for name, value in first.items():
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    merged[name] = value
                    continue
                rows = [
                    pieces[place][name].flatten() if place in pieces else value.new_zeros(size)
                    for place, size in enumerate(flat._numels)
                ]
                full = torch.cat(rows)
                sharded = handle.uses_sharded_strategy
                merged[name] = handle._get_shard(full, handle.rank, handle.world_size)[0].clone() if sharded else full
            optimizer.state[flat] = merged


def _cut(state: dict[str, Any], handle: Any, place: int) -> dict[str, Any]:
    """The piece that this process has of a parameter's state."""
    if not handle.uses_sharded_strategy:
        return state
    shape, info = handle.flat_param._shapes[place], handle.flat_param._shard_param_infos[place]
    piece = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else slice(0)
    return {
        name: value.flatten()[piece].clone() if isinstance(value, torch.Tensor) and value.shape == shape else value
        for name, value in state.items()
    }
