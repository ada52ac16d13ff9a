"""Where the parameters of a model are in the flat ones of FSDP version 1, for optimizers and norms."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

from accelerate.torch_internals.fsdp1 import FlatParameter, ModuleParameter, flat_parameters, name_before


class Flat:
    """The flat parameters of one wrapped model."""

    def __init__(self, wrapped: Wrapper, before: Mapping[tuple[int, str], torch.Tensor] | None = None) -> None:
        """before: the parameters that the model had, by module and name, which an optimizer may have."""
        self._flats = flat_parameters(wrapped)
        # What the model called its modules.
        self._modules = {id(module): name_before(name) for name, module in wrapped.named_modules()}
        # What the model called the parts of each parameter that it has now.
        self._names: dict[int, list[str]] = {}
        self._counts: dict[int, bool] = {}
        # For each old parameter, by its number: itself, which must not be kept alive, and its place in a flat one.
        self._homes: dict[int, tuple[weakref.ref[Any], FlatParameter, int]] = {}
        for flat in self._flats:
            self._add(flat, before or {})
        order = {module: number for number, module in enumerate(self._modules)}
        places = [place for flat in self._flats for place in flat.places]
        self._order = [self._name(place) for place in sorted(places, key=lambda place: order[id(place.module)])]

    def _name(self, place: ModuleParameter) -> str:
        prefix = self._modules[id(place.module)]
        return f"{prefix}.{place.name}" if prefix else place.name

    def _add(self, flat: FlatParameter, before: Mapping[tuple[int, str], torch.Tensor]) -> None:
        for parameter in [flat.parameter, *flat.originals]:
            self._counts[id(parameter)] = flat.counts
        names = self._names[id(flat.parameter)] = [self._name(place) for place in flat.places]
        for parameter, name in zip(flat.originals, names, strict=False):
            self._names[id(parameter)] = [name]
        for part, place in enumerate(flat.places):
            old = before.get((id(place.module), place.name))
            if old is not None:
                self._homes[id(old)] = (weakref.ref(old), flat, part)

    def tied_names(self) -> list[set[str]]:
        """The names of each parameter that has several."""
        found: dict[str, set[str]] = {}
        for flat in self._flats:
            for first, other in flat.shared:
                found.setdefault(self._name(first), {self._name(first)}).add(self._name(other))
        return list(found.values())

    def _home(self, parameter: torch.Tensor) -> tuple[FlatParameter, int] | None:
        """The flat parameter that this one became part of, and which part."""
        old, flat, part = self._homes.get(id(parameter), (None, None, 0))
        return None if old is None or flat is None or old() is not parameter else (flat, part)

    def has_taken(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter that the model had became part of a flat one."""
        return self._home(parameter) is not None

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
        if homes[0][0].keeps_originals:
            self._replace(optimizer)
        else:
            self._flatten(optimizer)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Where the model keeps parameters of its own: each is a piece of the old one."""
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                home = self._home(old)
                if home is not None:
                    flat, part = home
                    new = group["params"][index] = flat.originals[part]
                    if old in optimizer.state:
                        optimizer.state[new] = _cut(optimizer.state.pop(old), flat, part)

    def _flatten(self, optimizer: torch.optim.Optimizer) -> None:
        chosen: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            kept: list[torch.Tensor] = []
            for parameter in group["params"]:
                home = self._home(parameter)
                if home is None:
                    kept.append(parameter)
                    continue
                flat, part = home
                if chosen.setdefault(id(flat), number) != number:
                    raise ValueError(
                        f"The optimizer has {self._name(flat.places[part])} in another group than parameters that FSDP "
                        "version 1 flattens together with it: pass use_orig_params=True, or use version 2."
                    )
                if not any(flat.parameter is one for one in kept):
                    kept.append(flat.parameter)
            group["params"][:] = kept
        self._flatten_state(optimizer)

    def _flatten_state(self, optimizer: torch.optim.Optimizer) -> None:
        states: dict[int, dict[int, Any]] = {}
        flats: dict[int, FlatParameter] = {}
        for old in list(optimizer.state):
            home = self._home(old)
            if home is None:
                continue
            flat, part = home
            flats[id(flat)] = flat
            states.setdefault(id(flat), {})[part] = optimizer.state.pop(old)
        for number, pieces in states.items():
            flat = flats[number]
            first = next(iter(pieces.values()))
            merged = {}
            for name, value in first.items():
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    merged[name] = value
                    continue
                rows = [
                    pieces[part][name].flatten() if part in pieces else value.new_zeros(size)
                    for part, size in enumerate(flat.numels)
                ]
                merged[name] = flat.shard(torch.cat(rows))
            optimizer.state[flat.parameter] = merged

    # --- gradients in the middle of a window --------------------------------------------------------------------

    def unreduced_gradients(self) -> dict[str, torch.Tensor]:
        """Those of this process alone, by name: without an exchange they are kept as a whole."""
        found: dict[str, torch.Tensor] = {}
        for flat in self._flats:
            gradient = flat.unreduced_gradient()
            found |= {} if gradient is None else self._named(flat, gradient)
        return found

    def reduced_gradients(self) -> dict[str, torch.Tensor] | None:
        """Those that are exchanged, by name, of which each process gets some; None where there are none."""
        found: dict[str, torch.Tensor] | None = None
        for flat in self._flats:
            piece = flat.reduced_gradient()
            if piece is None:
                continue
            pieces = [torch.empty_like(piece, device=flat.device) for _ in range(dist.get_world_size(flat.group))]
            dist.all_gather(pieces, piece.detach().to(flat.device), group=flat.group)
            full = torch.cat(pieces)[: flat.size.numel()]
            found = {} if found is None else found
            for number, (name, gradient) in enumerate(self._named(flat, full).items()):
                if number % len(pieces) == dist.get_rank(flat.group):
                    found[name] = gradient.clone()
        return found

    def put_gradients(
        self, unreduced: dict[str, torch.Tensor], reduced: dict[str, torch.Tensor], dtype: torch.dtype | None
    ) -> None:
        """Have these gradients, by name, and no others. dtype: of those that wait, if not that of the parameters."""
        for flat, waits in zip(self._flats, self._wait_anywhere(unreduced), strict=True):
            own = flat.parameter.dtype
            mine = self._flattened(flat, unreduced, dtype or own)
            if mine is None and waits:
                mine = torch.zeros(flat.size, dtype=dtype or own, device=flat.device)
            flat.put_gradients(self._flattened(flat, reduced, own), mine)

    def _wait_anywhere(self, unreduced: dict[str, torch.Tensor]) -> list[bool]:
        """For which of the flat parameters some process has gradients that wait."""
        if not self._flats:
            return []
        here = [any(name in unreduced for name in self._names[id(flat.parameter)]) for flat in self._flats]
        anywhere = torch.tensor(here, dtype=torch.int32, device=self._flats[0].device)
        dist.all_reduce(anywhere)
        return [bool(count) for count in anywhere.tolist()]

    def _named(self, flat: FlatParameter, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of something as large as a whole flat parameter, by what the model called them."""
        trained = [p.requires_grad for p in flat.originals] or [True] * len(flat.shapes)
        parts = zip(self._names[id(flat.parameter)], flat.parts(full), trained, strict=True)
        return {name: part for name, part, trains in parts if trains}

    def _flattened(
        self, flat: FlatParameter, parts: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor | None:
        if not any(name in parts for name in self._names[id(flat.parameter)]):
            return None
        full = torch.zeros(flat.size, dtype=dtype, device=flat.device)
        for name, part in self._named(flat, full).items():
            if name in parts:
                part.copy_(parts[name])
        return full


def _cut(state: dict[str, Any], flat: FlatParameter, part: int) -> dict[str, Any]:
    """The piece that this process has of a parameter's state."""
    if not flat.is_sharded:
        return state
    shape, piece = flat.shapes[part], flat.piece(part)
    return {
        name: value.flatten()[piece].clone() if isinstance(value, torch.Tensor) and value.shape == shape else value
        for name, value in state.items()
    }
