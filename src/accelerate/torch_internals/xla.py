"""Tensors and chips of torch_xla."""

from __future__ import annotations

import re

import torch


def tensor_id(tensor: torch.Tensor) -> int:
    """What tells a tensor of torch_xla from others; without its own number, views of one are taken for several."""
    import torch_xla

    try:
        return int(torch_xla._XLAC._xla_get_tensor_id(tensor))
    except AttributeError:
        return id(tensor)


def take_a_chip(local_rank: int, local_size: int) -> None:
    """Make one of several processes on this machine that of one chip: before it touches the device.

    torch_xla does the same where its own launcher, or a rendezvous over `xla://`, sets processes up.
    """
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, local_size)


def cut_along(tensor: torch.Tensor) -> int | None:
    """The dimension along which a tensor of torch_xla is cut over several devices; None for one that is whole.

    Without the name, all are taken for whole: XLA then decides itself how loaded states of optimizers are cut.
    """
    import torch_xla

    try:
        spec = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    except AttributeError:
        return None
    found = re.match(r"\{devices=\[([\d,]+)\]", spec)
    if found is None:
        return None
    counts = [int(count) for count in found[1].split(",")][: tensor.ndim]
    return next((dimension for dimension, count in enumerate(counts) if count > 1), None)


def is_in_use() -> bool:
    """Whether a device of torch_xla was taken for itself, so that it is late to take all of them for one.

    Without the name, it is taken not to be: torch_xla then says what it does.
    """
    import torch_xla

    try:
        return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked())
    except AttributeError:
        return False


def has_started() -> bool:
    """Whether this process uses a device of torch_xla already; without the name, it is taken not to."""
    import torch_xla

    try:
        return bool(torch_xla._XLAC._xla_runtime_is_initialized())
    except AttributeError:
        return False
