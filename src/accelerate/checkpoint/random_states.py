"""The random states of one process."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

from accelerate.devices import Device

_PYTHON, _NUMPY, _TORCH = "random_state", "numpy_random_seed", "torch_manual_seed"


def capture(device: Device | None = None) -> dict[str, Any]:
    """The states of python, numpy, torch and, where it has its own, the device."""
    states: dict[str, Any] = {
        _PYTHON: random.getstate(),
        _NUMPY: np.random.get_state(),
        _TORCH: torch.get_rng_state(),
    }
    if device is not None and device.name != "cpu":
        states[device.rng_key] = device.stored_rng()
    return states


def check(states: dict[str, Any]) -> None:
    """Raise for what `restore` would not take, and change nothing. Of the device's it is known only there."""
    _restore_into(states, random.Random(), np.random.RandomState(), torch.Generator())


def _restore_into(states: dict[str, Any], python: Any, numpy: Any, generator: torch.Generator) -> None:
    if _PYTHON in states:
        version, internal, gauss = states[_PYTHON]
        python.setstate((version, tuple(internal), gauss))
    if _NUMPY in states:
        numpy.set_state(states[_NUMPY])
    if _TORCH in states:
        generator.set_state(states[_TORCH].cpu())


def restore(states: dict[str, Any], device: Device | None = None) -> None:
    _restore_into(states, random, np.random, torch.default_generator)
    if device is not None and device.rng_key in states:
        device.restore_rng(states[device.rng_key])


def derive(states: dict[str, Any], last: dict[str, Any], rank: int, device: Device | None = None) -> None:
    """Random states for a rank that has none of its own: they follow from those of rank 0, and differ by rank.

    last: those of the last rank that has some. If python's or numpy's are the same there, they are on all ranks, as
    `set_seed` leaves them, and become so on this one: samplers may shuffle with them, and all must give one order.
    """
    first = int(states[_TORCH].cpu().to(torch.int64).mul(torch.arange(1, states[_TORCH].numel() + 1)).sum())
    seed = int(np.random.SeedSequence([abs(first), rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if device is not None:
        device.seed(seed)
    shared = {
        name: states[name]
        for name in (_PYTHON, _NUMPY)
        if name in states and pickle.dumps(states[name]) == pickle.dumps(last.get(name))
    }
    _restore_into(shared, random, np.random, torch.default_generator)
