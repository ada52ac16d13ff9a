"""Sparse gradients in files of dense tensors: exactly as they are, with indices that come twice and values of zero."""

from __future__ import annotations

import torch

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
