"""Gradients of an open window: sparse ones in files of dense tensors, exactly as they are; and those of all ranks."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run
from accelerate.io.safetensors_format import read_safetensors
from accelerate.torch_internals.tensors import sparse_parts

_PARTS = ("indices", "values", "facts")


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in dense tensors: a sparse one becomes three, with names of its own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout == torch.sparse_coo:
            indices, values, coalesced = sparse_parts(tensor)
            parts = (indices.contiguous(), values.contiguous(), torch.tensor([int(coalesced), *tensor.shape]))
            found |= {_part(name, kind): part for kind, part in zip(_PARTS, parts, strict=True)}
        else:
            found[name] = tensor.to_dense()
    return found


def unpacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `packed` was given."""
    found = dict(tensors)
    last = _part("", _PARTS[-1])
    for name in [key.removesuffix(last) for key in tensors if key.endswith(last)]:
        indices, values, facts = (found.pop(_part(name, kind)) for kind in _PARTS)
        coalesced, *shape = facts.tolist()
        found[name] = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=True, is_coalesced=bool(coalesced)
        )
    return found


def _part(name: str, kind: str) -> str:
    return f"{name}#{kind}"


Gradients = dict[str, torch.Tensor]


def read_gradients(run: Run, reader: CheckpointReader, alike: bool = False) -> tuple[Gradients, Gradients]:
    """What this process had accumulated by itself, and what is the same for all: exchanged already, or a mean.

    On another number of processes each gets the mean; theirs is the same. alike: so it is here.
    """
    sharded_state = layout.gradient_shards()
    everyone: Gradients = read_full(reader.folder / sharded_state) if reader.has(sharded_state) else {}
    if run.saved_ranks == run.ranks and not alike:
        own = layout.gradients(run.rank)
        return unpacked(read_safetensors(reader.path(own))) if reader.has(own) else {}, everyone
    files = [layout.gradients(rank) for rank in range(run.saved_ranks)]
    saved = [unpacked(read_safetensors(reader.path(file))) for file in files if reader.has(file)]
    for name in {name for gradients in saved for name in gradients}:
        mean = reduce(torch.add, (gradients[name] for gradients in saved if name in gradients)) / run.saved_ranks
        everyone[name] = mean + everyone[name] if name in everyone else mean
    return {}, everyone


def added(one: torch.Tensor | None, other: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Both gradients together, as the parameter is; None where there is none."""
    found = [
        gradient.to(parameter.device, parameter.dtype, copy=True) for gradient in (one, other) if gradient is not None
    ]
    return sum(found[1:], found[0]) if found else None


def read_full(folder: Path) -> dict[str, Any]:
    """All of what several processes wrote in shards."""
    from accelerate.checkpoint import sharded_state  # brings in torch.distributed.checkpoint, which few runs need

    return sharded_state.read(folder, sharded_state.whole)
