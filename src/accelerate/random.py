"""Random states: seeding them, and making those of all processes equal."""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from accelerate.comm import current
from accelerate.config.enums import RNGType
from accelerate.devices import Device, by_name
from accelerate.state import PartialState


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy, torch and the device.

    Args:
        seed: the seed.
        device_specific: use a different seed on each rank: `seed` plus the rank.
        deterministic: make torch use deterministic algorithms only.
    """
    try:
        seed = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"`set_seed` takes a whole number, but was given {seed!r}.") from error
    state = PartialState()
    if device_specific:
        seed += state.process_index
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    state.device_kind.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set a random state to that of rank 0.

    Args:
        rng_type: which one: "torch", "cuda", "xla", "generator", ...
        generator: the generator, if `rng_type` is "generator".
    """
    communicator = current()
    kind = RNGType(rng_type) if rng_type is not None else None
    if kind is None or communicator.size == 1:
        return
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("Synchronizing a generator needs one: pass `generator`.")
        generator.set_state(communicator.broadcast(generator.get_state().contiguous()))
    elif kind == RNGType.TORCH:
        torch.set_rng_state(communicator.broadcast(torch.get_rng_state().contiguous()))
    else:
        device = by_name(kind.value)
        device.set_rng_state(communicator.broadcast(device.rng_state().contiguous()))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Set several random states to those of rank 0.

    Args:
        rng_types: which ones; see `synchronize_rng_state`.
        generator: the generator for "generator". Without one, that entry is ignored.
    """
    for rng_type in rng_types:
        if RNGType(rng_type) == RNGType.GENERATOR and generator is None:
            continue
        synchronize_rng_state(RNGType(rng_type), generator=generator)


# --- the states of the global generators ------------------------------------------------------------------------

_GLOBAL: dict[str, Callable[[], Any]] = {
    "python": random.getstate,
    "numpy": lambda: np.random.get_state(),  # numpy imports its generators at their first use
    "torch": torch.get_rng_state,
}
NAMES = tuple(_GLOBAL)


def global_states(names: Iterable[str] = NAMES) -> dict[str, Any]:
    """The states of the global generators of this process, by name."""
    return {name: _GLOBAL[name]() for name in names}


def set_global_states(
    states: dict[str, Any], python: Any = random, numpy: Any = None, generator: torch.Generator | None = None
) -> None:
    """Set those that are among `states`: of the global generators, or of others that are given in their place."""
    if "python" in states:
        version, internal, gauss = states["python"]
        python.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        (np.random if numpy is None else numpy).set_state(states["numpy"])
    if "torch" in states:
        (generator or torch.default_generator).set_state(torch.as_tensor(states["torch"]).cpu())


def drawn_since(before: dict[str, Any]) -> set[str]:
    """From which global generators something was drawn. Equal tensors need not be equal when they are pickled."""
    after = global_states()
    return {name for name in before if _plain(before[name]) != _plain(after[name])}


def _plain(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


# --- as a checkpoint has them -----------------------------------------------------------------------------------

# Their keys in the file, as 1.x releases have them, by the name of the generator.
_KEYS = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def capture_random_states(device: Device | None = None) -> dict[str, Any]:
    """The random states of Python, NumPy, torch and the device."""
    states = {_KEYS[name]: state for name, state in global_states().items()}
    if device is not None and device.name != "cpu":
        states[device.rng_key] = device.stored_rng()
    return states


def restore_random_states(states: dict[str, Any], device: Device | None = None) -> None:
    """Set what `capture_random_states` has returned."""
    set_global_states(states_by_name(states))
    if device is not None and device.name != "cpu" and device.rng_key in states:
        device.restore_rng(states[device.rng_key])


def states_by_name(states: dict[str, Any]) -> dict[str, Any]:
    """Those of the global generators, for `set_global_states`."""
    return {name: states[key] for name, key in _KEYS.items() if key in states}


def derive_random_states(states: dict[str, Any], last: dict[str, Any], rank: int, device: Device | None = None) -> None:
    """Set random states for a rank that has none: derived from those of rank 0, and different on each rank.

    last: the states of the last rank that has some. If Python's or NumPy's state is the same there, it is the same on
    all ranks, as after `set_seed`, and is set here, too: samplers may shuffle with it, and all ranks need one order.
    """
    own, others = states_by_name(states), states_by_name(last)
    first = int(own["torch"].cpu().to(torch.int64).mul(torch.arange(1, own["torch"].numel() + 1)).sum())
    seed = int(np.random.SeedSequence([abs(first), rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if device is not None:
        device.seed(seed)
    alike = [name for name in ("python", "numpy") if name in own and _same(own[name], others.get(name))]
    set_global_states({name: own[name] for name in alike})


def _same(state: Any, other: Any) -> bool:
    return pickle.dumps(state) == pickle.dumps(other)
