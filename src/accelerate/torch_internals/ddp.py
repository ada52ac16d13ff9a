"""DistributedDataParallel: whether it was called, what its reducer expects, and how long exchanges took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate.torch_internals.missing import gone


def knows_its_graph(wrapped: DistributedDataParallel) -> bool:
    """Whether a model with a static graph has had the backward in which it is learned.

    Never, where torch does not tell: such a model then exchanges its gradients in each backward.
    """
    return bool(getattr(wrapped, "_static_graph_delay_allreduce_enqueued", False))


def was_called(wrapped: DistributedDataParallel) -> bool:
    """Whether the wrapper has had a forward, in which torch notes it. Its Python reducer needs none.

    True where torch does not tell: a script that calls the model inside by mistake is not warned.
    """
    return bool(getattr(wrapped, "_lazy_init_ran", True) or getattr(wrapped, "_use_python_reducer", False))


def expect_backward(wrapped: DistributedDataParallel) -> None:
    """Tell the reducer of a model whose forward ran under `no_sync` to exchange gradients in the next backward.

    Without a reducer that can be told, `trigger_sync_in_backward` is lost.
    """
    prepare: Any = getattr(getattr(wrapped, "reducer", None), "prepare_for_backward", None)
    if prepare is None:
        raise gone(
            "Reducer.prepare_for_backward", "trigger_sync_in_backward", "run the last forward of a window under sync"
        )
    prepare([])


def settle_buckets(wrapped: DistributedDataParallel, agreed: Callable[[bool], bool]) -> None:
    """Have DDP put gradients together in one way from the first step on: in the order of the parameters, last first.

    Else it does so from the second step on, in the order in which the first backward has brought them. A sum of more
    than two numbers is rounded by its place in the exchange, so the first step of a resumed run would come out
    differently from that of a run that goes on. Everything of this is done by one backward whose gradients are zero.
    Without a reducer that can be told, or where that backward would be seen by hooks of the script or does not fit the
    gradients that are expected, nothing is done: then a resumed run is the same up to rounding.

    agreed: whether all ranks say yes; a hook may be on one of them alone, and all have to take part, or none.
    """
    prepare: Any = getattr(getattr(wrapped, "reducer", None), "prepare_for_backward", None)
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    possible = prepare is not None and not wrapped.static_graph and not wrapped.find_unused_parameters
    if not agreed(possible and not _is_special(wrapped, parameters)):
        return
    with torch.enable_grad():
        total = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            total = total + (parameter.sum() * 0.0).to(total)  # the backward goes from the last one to the first
        prepare([])
        total.backward()
    for parameter in parameters:
        parameter.grad = None


def _is_special(wrapped: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> bool:
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    return (
        getattr(wrapped, "mixed_precision", None) is not None
        or any(getattr(module, "sparse", False) for module in wrapped.modules())
        or any(parameter.grad is not None or parameter.is_complex() for parameter in parameters)
        or any(getattr(parameter, name, None) for parameter in parameters for name in hooks)
    )


def measure_every(wrapped: DistributedDataParallel, iterations: int) -> None:
    """How often DDP measures an iteration. Without it, the step timer counts exchanges as part of the backward."""
    measure: Any = getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", None)
    if measure is not None:
        measure(iterations)


def measured(wrapped: DistributedDataParallel) -> Mapping[str, int]:
    """The times that DDP has written down for the last iteration it has measured, by name; none without its logger."""
    numbers: Any = getattr(getattr(wrapped, "logger", None), "_get_ddp_logging_data", None)
    return {} if numbers is None else numbers().ints_map
