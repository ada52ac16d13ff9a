"""The random states that the order of a loader comes from: the global generators, and generators of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate.data_loader.epoch import EpochPart
from accelerate.random import drawn_since, global_states, set_global_states

if TYPE_CHECKING:
    from accelerate.data_loader.base import DataLoaderAdapter

# --- of the order -------------------------------------------------------------------------------------------------


def generators(loader: DataLoaderAdapter) -> list[torch.Generator]:
    """The generators that may decide the order of a loader, each once, in the same order however it is wrapped."""
    found: list[torch.Generator] = []
    seen: set[int] = set()

    def add(value: Any) -> None:
        if isinstance(value, torch.Generator) and not any(value is other for other in found):
            found.append(value)

    def visit(holder: Any) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        inner = []
        for name, value in sorted(getattr(holder, "__dict__", {}).items(), key=lambda item: item[0]):
            add(value)
            values = value if type(value) in (list, tuple) and value and _decides(value[0]) else [value]
            inner += [one for one in values if _decides(one) or name in ("sampler", "batch_sampler")]
        for one in inner:
            visit(one)

    add(loader.synchronized_generator)
    add(loader.part.torch_loader.generator)
    visit(loader.dataset if loader.part.is_iterable else loader.part.indices)
    return found


def _decides(value: Any) -> bool:
    return isinstance(value, (Sampler, IterableDataset))


def draws_at_once(sampler: Any) -> bool:
    """Whether nothing more is drawn for an epoch when its first index is there; torch's RandomSampler draws at the end,
    too."""
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


# --- to keep and to set -----------------------------------------------------------------------------------------


def random_states(loader: DataLoaderAdapter) -> dict[str, Any]:
    return {**global_states(), "generators": generator_states(loader)}


def generator_states(loader: DataLoaderAdapter) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators(loader)]


def set_generators(loader: DataLoaderAdapter, states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators(loader), states, strict=False):
        generator.set_state(state)


# --- the number that torch's loader draws -----------------------------------------------------------------------


def makes_iterator(loader: DataLoaderAdapter, part: EpochPart) -> bool:
    """Whether torch's loader, when it is iterated next, makes a new iterator, and draws a number (the seed of its
    workers) for it. That of workers that stay is used again."""
    return part is not loader.part or loader.reused is None


@contextmanager
def drawing_seed(torch_loader: Any, makes: bool, draws: bool) -> Iterator[None]:
    """Have torch's loader, while it is told to iterate, take a number from the random states or leave them alone.

    makes: whether it makes an iterator, and so takes one by itself.
    """
    if draws == makes:
        yield
    elif draws:
        _draw(torch_loader.generator)
        yield
    else:
        own = torch_loader.generator
        torch_loader.generator = _twin(own)
        try:
            yield
        finally:
            torch_loader.generator = own


@contextmanager
def undisturbed(loader: DataLoaderAdapter) -> Iterator[None]:
    """Restore all random states afterwards."""
    states = random_states(loader)
    try:
        yield
    finally:
        set_global_states(states)
        set_generators(loader, states["generators"])


def makes_all_at_once(loader: DataLoaderAdapter, batches: Any) -> bool:
    """Whether a batch sampler draws its order when it is told to iterate, and not with its first batch."""
    with undisturbed(loader):
        before, own = global_states(), generator_states(loader)
        iter(batches)
        return bool(drawn_since(before)) or not all(map(torch.equal, own, generator_states(loader)))


def state_of_one(start: dict[str, Any], sampler: Any, at_once: bool) -> torch.Tensor:
    """The state of a generator that shuffles as a single process, which has none, did from the global state.

    at_once: whether a batch sampler has drawn from it before torch's loader drew its number, and not after.
    """
    generator = torch.Generator()
    generator.set_state(start["torch"])
    if start["draws"] and not at_once:
        _draw(generator)
    if isinstance(sampler, RandomSampler):
        generator.manual_seed(_draw(generator))
    return generator.get_state()


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _twin(generator: torch.Generator | None) -> torch.Generator:
    generator = generator or torch.default_generator
    twin = torch.Generator(generator.device)
    twin.set_state(generator.get_state())
    return twin
