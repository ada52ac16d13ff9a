"""The tensor axis: layers that several processes compute together, each with a part of the weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from accelerate.modules import model_has_dtensor
from accelerate.parallelism_config import ParallelismConfig

# How a layer may be split, by name. "gather" and "rep": its output, or its input, is whole on every process.
STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
    "sequence_parallel": SequenceParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}

Plan = Mapping[str, "str | ParallelStyle"]


def split(model: nn.Module, mesh: DeviceMesh, config: ParallelismConfig) -> None:
    """Split the layers of a model, in place, as its plan says; one that came split stays as it is."""
    if model_has_dtensor(model):
        return
    plan = _plan_of(model, config)
    parallelize_module(model, mesh, {name: _style(name, style) for name, style in plan.items()})


def _plan_of(model: nn.Module, config: ParallelismConfig) -> Plan:
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
            f"The plan for tensor parallelism names {', '.join(unknown)}, which no part of this "
            f"{type(model).__name__} is called: use names as in `model.named_modules()`, with * for a number."
        )
    return plan


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch.fnmatch(a, b) for a, b in zip(parts, wanted, strict=True))


def _style(name: str, style: str | ParallelStyle) -> ParallelStyle:
    if not isinstance(style, str):
        return style
    if style not in STYLES:
        raise ValueError(f"The plan splits {name} by {style!r}: choose one of {', '.join(STYLES)}, or pass an object.")
    made: ParallelStyle = STYLES[style]()
    return made
