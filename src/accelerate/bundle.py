"""What one call of `prepare` was given, sorted by kind, on its way through precision and strategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

# Which list of a Bundle takes an object. Stand-ins for objects that an engine makes itself (a "dummy" optimizer, say)
# are of none of these classes: they name their list in a class attribute `_accelerate_kind`.
_KINDS: tuple[tuple[type, str], ...] = (
    (DataLoader, "loaders"),
    (torch.nn.Module, "models"),
    (torch.optim.Optimizer, "optimizers"),
    (LRScheduler, "schedulers"),
)


def kind_of(item: Any) -> str | None:
    """The list of a `Bundle` that an object belongs to; None for what `prepare` hands back as it is."""
    known = next((kind for base, kind in _KINDS if isinstance(item, base)), None)
    return known or getattr(type(item), "_accelerate_kind", None)


@dataclass(eq=False)
class Entry:
    """One object. `value` is what was given, and in the end what `prepare` returns in its place."""

    value: Any
    # Whether to put it on the device; None leaves that to the Accelerator.
    placement: bool | None = None
    # A model that is never trained, and needs none of the engine's wrappers.
    evaluation: bool = False
    # Whether a model lies on the device as a whole when precision and strategy get it.
    placed: bool = False


@dataclass
class Bundle:
    """The objects of one call, each an `Entry` in the list of its kind, and what earlier calls have prepared.

    Precision and strategy replace the `value` of entries. Earlier objects are for looking at: an optimizer may be
    prepared before its model.
    """

    models: list[Entry] = field(default_factory=list)
    optimizers: list[Entry] = field(default_factory=list)
    schedulers: list[Entry] = field(default_factory=list)
    loaders: list[Entry] = field(default_factory=list)
    # As the script made them, from under our wrapper.
    earlier_optimizers: list[Any] = field(default_factory=list)

    def add(
        self, item: Any, placement: bool | None = None, *, kind: str | None = None, evaluation: bool = False
    ) -> Entry:
        """Sort one object in; an object of no kind gets an entry that nobody looks at. kind: where it is known.

        An object that comes twice has one entry, except for loaders: each of them has a place of its own.
        """
        kind = kind or kind_of(item)
        entries: list[Entry] = [] if kind is None else getattr(self, kind)
        same = next((entry for entry in entries if entry.value is item and kind != "loaders"), None)
        if same is not None:
            return same
        entry = Entry(item, placement, evaluation)
        entries.append(entry)
        return entry

    def every_optimizer(self) -> Iterable[Any]:
        """The optimizers of this call and of earlier ones."""
        return (*(entry.value for entry in self.optimizers), *self.earlier_optimizers)
