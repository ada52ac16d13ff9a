"""The tensor axis: layers that several processes compute together, each with a part of the weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from accelerate.modules import model_has_dtensor
from accelerate.parallelism_config import ParallelismConfig

# How a layer may be split, by name. "gather" and "rep": its output, or its input, is whole on every process.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
    "sequence_parallel": SequenceParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}

Styles = dict[str, ParallelStyle]


def plan_of(model: nn.Module, mesh: DeviceMesh, config: ParallelismConfig | None) -> Styles | None:
    """How the layers of a model are split over a mesh, for `parallelize_module`; None for one that came split."""
    assert config is not None
    if model_has_dtensor(model):
        sizes = {p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)}
        if sizes != {mesh.size()}:
            raise ValueError(
                f"This {type(model).__name__} came split over {' and '.join(map(str, sorted(sizes)))} processes, "
                f"but tp_size is {mesh.size()}: split it over that many, or pass the unsplit model, which is then "
                "split here."
            )
        return None
    plan = _asked(model, config)
    return {name: _style(name, style) for name, style in plan.items()}


def _asked(model: nn.Module, config: ParallelismConfig) -> Mapping[str, str | ParallelStyle]:
    handler: Any = config.tp_handler
    plan: Any = handler.plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tp_size={config.tp_size} needs to know how to split this {type(model).__name__}: load it already split, "
            "set `model.tp_plan`, or pass tp_handler=TorchTensorParallelConfig(plan={'layers.*.up': 'colwise', ...})."
        )
    names = [name for name, _ in model.named_modules()]
    unknown = [key for key in plan if not any(_matches(name, key) for name in names)]
    if unknown:
        raise ValueError(
            f"The plan for tensor parallelism names {', '.join(unknown)}, which this {type(model).__name__} does "
            "not have: use names as in `model.named_modules()`, with * for a number."
        )
    found: Mapping[str, str | ParallelStyle] = plan
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch.fnmatch(a, b) for a, b in zip(parts, wanted, strict=True))


def _style(name: str, style: str | ParallelStyle) -> ParallelStyle:
    if not isinstance(style, str):
        return style
    if style not in STYLES:
        raise ValueError(f"The plan splits {name} by {style!r}: choose one of {', '.join(STYLES)}, or pass an object.")
    return STYLES[style]()
