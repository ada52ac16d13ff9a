"""The pieces of a checkpoint of ZeRO, for another number of processes than has written them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Span:
    """A piece of a parameter: where it begins in the flat tensor of its group, and in the parameter."""

    group: int
    start: int
    begin: int
    numel: int


Spans = dict[str, _Span]


class _Pieces:
    """How one process's parts of parameters, and the states of an optimizer for them, lie in flat tensors.

    The default is that of stages 1 and 2: all parameters of a group in a row, cut into as many parts as there are
    processes, wherever that cuts a parameter.
    """

    weights = "single_partition_of_fp32_groups"
    states = "base_optimizer_state"

    def __init__(self, engine: Any, shapes: list[dict[str, torch.Size]]) -> None:
        """shapes: of the parameters of each group, as they were saved."""
        self.engine = engine
        self.optimizer = engine.optimizer
        self.shapes = shapes
        # How much of each parameter the processes before have had.
        self._begins: dict[str, int] = {}

    def flat(self) -> list[torch.Tensor]:
        """Those of this process, group by group."""
        found: list[torch.Tensor] = self.optimizer.single_partition_of_fp32_groups
        return found

    def here(self) -> Spans:
        """What this process has."""
        begins = {
            self.engine.param_names[p]: p._hp_mapping.lp_fragment_address.start
            for group in self.optimizer.bit16_groups
            for p in group
            if p._hp_mapping is not None
        }
        return dict(_spans(self.optimizer._param_slice_mappings, begins))

    def saved(self, content: dict[str, Any], rank: int, count: int) -> Spans:
        """What is in the file of one of `count` processes. Asked for one after the other."""
        spans = dict(_spans(content["param_slice_mappings"], self._begins))
        for name, span in spans.items():
            self._begins[name] = span.begin + span.numel
        return spans

    def param_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups of an optimizer, with the settings that were saved."""
        return saved

    def rest(self) -> dict[str, Any]:
        """What else depends on the number of processes."""
        return {
            "param_slice_mappings": self.optimizer._param_slice_mappings,
            "group_paddings": [0 for _ in self.flat()],
            "partition_count": self.optimizer.partition_count,
        }


class _PiecesOfEach(_Pieces):
    """In stage 3 each parameter is cut into as many parts as there are processes, the last ones filled up."""

    weights = "fp32_flat_groups"
    states = "optimizer_state_dict"

    def flat(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.optimizer.fp32_partitioned_groups_flat
        return found

    def here(self) -> Spans:
        return self._cut(self.engine._get_zero_param_shapes(), self._rank(), self.engine.seq_dp_world_size)

    def saved(self, content: dict[str, Any], rank: int, count: int) -> Spans:
        return self._cut(self.shapes, rank, count)

    def param_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        owners = self.optimizer.sub_group_to_group_id
        return [
            {**group, "params": [flat for flat in range(len(self.flat())) if owners[flat] == number]}
            for number, group in enumerate(saved)
        ]

    def rest(self) -> dict[str, Any]:
        return {"partition_count": self.optimizer.partition_count}

    def _rank(self) -> int:
        return torch.distributed.get_rank(self.optimizer.dp_process_group)

    def _cut(self, groups: list[dict[str, torch.Size]], rank: int, count: int) -> Spans:
        spans = {}
        for number, group in enumerate(groups):
            start = 0
            for name, shape in group.items():
                part = math.ceil(shape.numel() / count)
                numel = max(0, min(part, shape.numel() - rank * part))
                spans[name] = _Span(number, start, rank * part, numel)
                start += part
        return spans


def own_part(
    engine: Any, shapes: list[dict[str, torch.Size]], count: int, read: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """What this process would find in its file, had as many processes saved as there are.

    count: how many have. read: the file of one of them. Each is looked at in turn, so no process needs memory for all.
    """
    pieces = (_PiecesOfEach if engine.zero_optimization_partition_weights() else _Pieces)(engine, shapes)
    here = pieces.here()
    flat = [torch.zeros(own.numel(), dtype=own.dtype) for own in pieces.flat()]
    states: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for rank in range(count):
        content = read(rank)["optimizer_state_dict"]
        found = found or content
        weights, saved = content[pieces.weights], content[pieces.states]["state"]
        for name, source in pieces.saved(content, rank, count).items():
            target = here.get(name)
            if target is None:
                continue
            large = weights[source.group]
            _copy(large, source, flat[target.group], target)
            own = states.setdefault(target.group, {})
            for key, value in saved.get(source.group, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() >= large.numel():
                    whole = own.setdefault(key, torch.zeros(flat[target.group].numel(), dtype=value.dtype))
                    _copy(value, source, whole, target)
                elif key not in own:
                    own[key] = copy.deepcopy(value)  # a count of steps, which each group counts by itself
    optimizer = {"state": states, "param_groups": pieces.param_groups(found[pieces.states]["param_groups"])}
    return {**found, **pieces.rest(), pieces.weights: flat, pieces.states: optimizer}


def _spans(mappings: list[dict[str, Any]], begins: dict[str, int]) -> Iterator[tuple[str, _Span]]:
    for number, group in enumerate(mappings):
        for name, address in group.items():
            yield name, _Span(number, address.start, begins.get(name, 0), address.numel)


def _copy(values: torch.Tensor, source: _Span, into: torch.Tensor, target: _Span) -> None:
    """What both spans have of a parameter."""
    begin = max(source.begin, target.begin)
    numel = min(source.begin + source.numel, target.begin + target.numel) - begin
    if numel > 0:
        piece = values.narrow(0, source.start + begin - source.begin, numel)
        into.narrow(0, target.start + begin - target.begin, numel).copy_(piece)
