"""Where the parameters of a model are in the flat ones of FSDP version 1, for optimizers and norms."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._flat_param import ParamInfo

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# What is put between the names of modules, and left out of state dicts.
_WRAPPER = "_fsdp_wrapped_module"


def unwrapped(name: str) -> str:
    """A name as it was before the model was wrapped."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


class Flat:
    """The flat parameters of one wrapped model."""

    def __init__(self, wrapped: Wrapper, before: dict[tuple[int, str], torch.Tensor] | None = None) -> None:
        """before: the parameters that the model had, by module and name, which an optimizer may have."""
        self._handles: list[Any] = []
        # What the model called its modules.
        self._modules = {id(module): unwrapped(name) for name, module in wrapped.named_modules()}
        # What the model called the parts of each parameter that it has now.
        self._names: dict[int, list[str]] = {}
        self._counts: dict[int, bool] = {}
        # For each old parameter, by its number: itself, which must not be kept alive, and its place in a flat one.
        self._homes: dict[int, tuple[weakref.ref[Any], Any, int]] = {}
        for module in Wrapper.fsdp_modules(wrapped):
            handle = module._handle
            if handle is not None:
                self._add(module, handle, before or {})
        places = {module: place for place, module in enumerate(self._modules)}
        infos = [info for handle in self._handles for info in handle.flat_param._param_infos]
        self._order = [self._name(info) for info in sorted(infos, key=lambda info: places[id(info.module)])]

    def _name(self, info: Any) -> str:
        prefix = self._modules[id(info.module)]
        return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)

    def _add(self, module: Any, handle: Any, before: dict[tuple[int, str], torch.Tensor]) -> None:
        flat = handle.flat_param
        self._handles.append(handle)
        counts = True
        if handle._sharding_strategy == ShardingStrategy.NO_SHARD or not handle.uses_sharded_strategy:
            counts = dist.get_rank() == 0
        elif module.sharding_strategy in _HYBRID:
            counts = dist.get_rank(module._inter_node_pg) == 0
        for parameter in [flat, *(flat._params or ())]:
            self._counts[id(parameter)] = counts
        self._names[id(flat)] = [self._name(info) for info in flat._param_infos]
        for parameter, name in zip(flat._params or (), self._names[id(flat)], strict=False):
            self._names[id(parameter)] = [name]
        for place, info in enumerate(flat._param_infos):
            old = before.get((id(info.module), info.param_name))
            if old is not None:
                self._homes[id(old)] = (weakref.ref(old), handle, place)

    def same(self) -> list[set[str]]:
        """The names of each parameter that has several."""
        found: dict[str, set[str]] = {}
        for handle in self._handles:
            for shared in handle.flat_param._shared_param_infos:
                first = self._name(ParamInfo(shared.prim_param_name, shared.prim_module, ""))
                found.setdefault(first, {first}).add(self._name(shared))
        return list(found.values())

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

    # --- gradients in the middle of a window --------------------------------------------------------------------

    def waiting(self) -> dict[str, torch.Tensor]:
        """Those of this process alone, by name: without an exchange they are kept as a whole."""
        found: dict[str, torch.Tensor] = {}
        for handle in self._handles:
            gradient = _gradient(handle)
            if gradient is not None and gradient.shape == handle.flat_param._unpadded_unsharded_size:
                found |= self._named(handle, gradient)
        return found

    def exchanged(self) -> dict[str, torch.Tensor] | None:
        """Those that are exchanged, by name, of which each process gets some; None where there are none."""
        found: dict[str, torch.Tensor] | None = None
        for handle in self._handles:
            piece = getattr(handle.flat_param, "_saved_grad_shard", None)
            piece = _gradient(handle) if piece is None else piece
            if piece is None or piece.shape == handle.flat_param._unpadded_unsharded_size:
                continue
            group = handle.process_group
            pieces = [torch.empty_like(piece, device=handle.device) for _ in range(dist.get_world_size(group))]
            dist.all_gather(pieces, piece.detach().to(handle.device), group=group)
            full = torch.cat(pieces)[: handle.flat_param._unpadded_unsharded_size.numel()]
            found = {} if found is None else found
            for number, (name, gradient) in enumerate(self._named(handle, full).items()):
                if number % len(pieces) == dist.get_rank(group):
                    found[name] = gradient.clone()
        return found

    def put_gradients(
        self, waiting: dict[str, torch.Tensor], exchanged: dict[str, torch.Tensor], dtype: torch.dtype | None
    ) -> None:
        """Have these gradients, by name, and no others. dtype: of those that wait, if not that of the parameters."""
        for handle in self._handles:
            flat = handle.flat_param
            flat.grad = None
            vars(flat).pop("_saved_grad_shard", None)
            whole = self._flattened(handle, exchanged, flat.dtype)
            if whole is not None:
                sharded = handle.uses_sharded_strategy
                flat.grad = handle._get_shard(whole, handle.rank, handle.world_size)[0] if sharded else whole
            whole = self._flattened(handle, waiting, dtype or flat.dtype)
            if whole is not None:
                _wait(flat, whole)
            if handle._use_orig_params:
                as_a_whole = whole is not None or not handle.uses_sharded_strategy
                (handle._use_unsharded_grad_views if as_a_whole else handle._use_sharded_grad_views)()

    def _named(self, handle: Any, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of something as large as a whole flat parameter, by what the model called them."""
        own = handle.flat_param._params
        trained = [True] * len(handle.flat_param._shapes) if own is None else [p.requires_grad for p in own]
        views = zip(self._names[id(handle.flat_param)], handle._get_unflat_views(full), trained, strict=True)
        return {name: view for name, view, trains in views if trains}

    def _flattened(self, handle: Any, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
        if not any(name in parts for name in self._names[id(handle.flat_param)]):
            return None
        full = torch.zeros(handle.flat_param._unpadded_unsharded_size, dtype=dtype, device=handle.device)
        for name, view in self._named(handle, full).items():
            if name in parts:
                view.copy_(parts[name])
        return full


def _gradient(handle: Any) -> torch.Tensor | None:
    flat = handle.flat_param
    if handle._use_orig_params and all(parameter.grad is None for parameter in flat._params):
        return None  # torch forgets what it has at the next forward
    gradient: torch.Tensor | None = flat.grad
    return gradient


def _wait(flat: Any, gradient: torch.Tensor) -> None:
    """Give a flat parameter, of which a piece is here, a whole gradient: so does a backward without an exchange."""
    if flat.grad is not None:
        flat._saved_grad_shard = flat.grad
        flat.grad = None
    # torch compares the sizes when a gradient is assigned, and at no other time.
    piece, flat.data = flat.data, gradient
    flat.grad = gradient
    flat.data = piece


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
