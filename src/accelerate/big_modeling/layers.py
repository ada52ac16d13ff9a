"""The biggest layer among those of a model that have no device yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

_NOTHING = range(0)


class BiggestLayer:
    """Track the size of the largest layer to be placed, while modules are taken, split and placed.

    A layer is a module without children, or of a class that must not be split; at the start also a tensor of the
    model itself. Layers are numbered in the order of the model, so those of a module are a range. The size is looked
    up again when all layers that have it were taken, or when asked for. Each step costs as much as the module at hand
    has layers, so that the whole is linear.
    """

    def __init__(
        self, entries: Sequence[tuple[str, Any]], module_sizes: Mapping[str, Any], no_split: Collection[str]
    ) -> None:
        self._module_sizes = module_sizes
        self._no_split = no_split
        self._sizes: list[Any] = []
        self._ranges: dict[str, range] = {}
        for name, part in entries:
            self._number(name, part)
        self._bare = [self._ranges[name] for name, part in entries if not isinstance(part, nn.Module)]
        self._placed = [False] * len(self._sizes)
        # In which look a layer was taken; the look counts them down.
        self._taken = [0] * len(self._sizes)
        self._left = Counter(self._sizes)
        self._ascending = sorted(self._left)
        self._look = 0
        self._find(_NOTHING)

    def _number(self, name: str, part: Any) -> None:
        start = len(self._sizes)
        children = list(part.named_children()) if isinstance(part, nn.Module) else []
        if not children or type(part).__name__ in self._no_split:
            self._sizes.append(self._module_sizes[name])
        else:
            for child_name, child in children:
                self._number(f"{name}.{child_name}", child)
        self._ranges[name] = range(start, len(self._sizes))

    def take(self, name: str) -> None:
        """Take a module out: room is kept for the largest of the others."""
        layers = self._ranges.get(name, _NOTHING)
        for layer in layers:
            if self._sizes[layer] == self.size and not self._placed[layer] and self._taken[layer] != self._look:
                self._taken[layer] = self._look
                self._remaining -= 1
        if self._remaining == 0:
            self.find_again(layers)

    def place(self, name: str) -> None:
        """Note that a module has its device."""
        self._set_placed(self._ranges.get(name, _NOTHING))

    def _set_placed(self, layers: range) -> None:
        for layer in layers:
            if not self._placed[layer]:
                self._placed[layer] = True
                self._left[self._sizes[layer]] -= 1

    def find_again(self, without: range = _NOTHING) -> None:
        """Look up the size. From then on, tensors do not count as layers."""
        for layers in self._bare:
            self._set_placed(layers)
        self._bare = []
        self._find(without)

    def _find(self, without: range) -> None:
        self._look += 1
        aside: Counter[Any] = Counter()
        for layer in without:
            if not self._placed[layer]:
                self._taken[layer] = self._look
                aside[self._sizes[layer]] += 1
        while self._ascending and not self._left[self._ascending[-1]]:
            self._ascending.pop()
        self.size: Any = next((size for size in reversed(self._ascending) if self._left[size] > aside[size]), 0)
        self._remaining = self._left[self.size] - aside[self.size]
