"""Tensors of torch_xla."""

from __future__ import annotations

import torch


def tensor_id(tensor: torch.Tensor) -> int:
    """What tells a tensor of torch_xla from others; without its own number, views of one are taken for several."""
    import torch_xla

    try:
        return int(torch_xla._XLAC._xla_get_tensor_id(tensor))
    except AttributeError:
        return id(tensor)
