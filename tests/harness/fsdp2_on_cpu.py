"""FSDP version 2 on the CPU with torch 2.6, which has it for GPUs alone: so that what runs there is tested here."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
import torch.distributed as dist


def complete_fsdp2() -> None:
    """As in later releases, let streams of the CPU take events, gathered weights be unchanged, and means be means."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    for name in ("record_event", "wait_event"):
        setattr(torch.cpu.Stream, name, lambda *_: torch.cpu.Event())
    importlib.import_module("torch.distributed.fsdp")  # which makes the operation
    torch.ops.fsdp.split_with_sizes_copy = _unseen(torch.ops.fsdp.split_with_sizes_copy)
    dist.reduce_scatter_tensor = _with_means(dist.reduce_scatter_tensor)
    dist.all_reduce = _with_means(dist.all_reduce)


def _unseen(copy: Any) -> Any:
    def copy_unseen(*args: Any, out: list[torch.Tensor], **kwargs: Any) -> None:
        with contextlib.ExitStack() as kept:
            for tensor in out:
                if not tensor.is_inference():
                    kept.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            copy(*args, out=out, **kwargs)

    return copy_unseen


def _with_means(reduce: Any) -> Any:
    """A reduction for which gloo knows no mean."""

    def reduce_or_mean(*args: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return reduce(*args, op=op, group=group, **kwargs)
        given = kwargs["input"] if "input" in kwargs else kwargs.get("tensor", args[-1] if args else None)
        given.div_(dist.get_world_size(group))
        return reduce(*args, op=dist.ReduceOp.SUM, group=group, **kwargs)

    return reduce_or_mean
