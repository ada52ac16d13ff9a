"""Stands in for what torch_xla cannot do on the CPU: several processes with a device each.

Everything else is real: the processes, the tensors of torch_xla, gloo, and all of this package. Only the calls that
go from chip to chip, and the questions who this process is, are answered here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def several_devices() -> None:
    """Make this process, one of several, the owner of one device among as many."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    # Chips are numbered by where they are: a launcher's ranks are not theirs.
    ordinal = size - 1 - rank
    xr.world_size = lambda: size
    xr.global_ordinal = lambda: ordinal
    xm.all_reduce = _all_reduce
    xm.all_gather = _all_gather


def _all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0) -> Any:
    single = isinstance(inputs, torch.Tensor)
    assert single or inputs, "torch_xla dies of an empty list"
    results = []
    for tensor in [inputs] if single else inputs:
        assert tensor.device.type == "xla"
        host = tensor.detach().cpu()
        dist.all_reduce(host, op=_OPS[reduce_type])
        results.append((host * scale).to(tensor.dtype).to(tensor.device))
    if single:
        return results[0]
    with torch.no_grad():
        for tensor, result in zip(inputs, results, strict=True):
            tensor.copy_(result)
    return inputs


def _all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    assert value.device.type == "xla" and dim == 0
    parts = [torch.empty(value.shape, dtype=value.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.detach().cpu())
    return torch.cat(parts).to(value.device)
