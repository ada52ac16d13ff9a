"""DistributedDataParallel: whether it was called, what its reducer expects, and how long exchanges took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from accelerate.torch_internals.missing import gone


def knows_its_graph(wrapped: DistributedDataParallel) -> bool:
    """Whether a model with a static graph has had the backward in which it is learnt.

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


def measure_every(wrapped: DistributedDataParallel, iterations: int) -> None:
    """How often DDP measures an iteration. Without it, the step timer counts exchanges as part of the backward."""
    measure: Any = getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", None)
    if measure is not None:
        measure(iterations)


def measured(wrapped: DistributedDataParallel) -> Mapping[str, int]:
    """The times that DDP has written down for the last iteration it has measured, by name; none without its logger."""
    numbers: Any = getattr(getattr(wrapped, "logger", None), "_get_ddp_logging_data", None)
    return {} if numbers is None else numbers().ints_map
