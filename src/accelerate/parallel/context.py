"""The context axis: sequences that several processes work on together, each with a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from accelerate.torch_internals.mesh import set_exchange_of_context

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig


@contextmanager
def sharded_sequences(
    config: ParallelismConfig,
    mesh: DeviceMesh,
    buffers: list[torch.Tensor] | None,
    dims: list[int] | None,
    no_restore: set[torch.Tensor] | None,
) -> Iterator[None]:
    """A context in which buffers hold this process's part of each sequence, and attention looks at all parts.

    dims: along which dimension of each buffer the sequence goes. no_restore: buffers that may stay cut afterwards.
    """
    from torch.distributed.tensor.experimental import context_parallel

    buffers = list(buffers or [])
    dims = list(dims or [])
    if len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one for each."
        )
    # Each process takes a piece from the start and one from the end, so that causal attention is equally long on all.
    pieces = 2 * config._sizes["cp"]
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.shape[dim] % pieces:
            raise ValueError(
                f"A sequence of length {buffer.shape[dim]} cannot be split into {pieces} equal chunks (two for each "
                f"of cp_size={config.cp_size} processes): pad it to a multiple of {pieces}."
            )
    handler: Any = config.cp_handler
    set_exchange_of_context(handler.cp_comm_strategy)
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(no_restore or ())):
        yield
