"""How one parameter of megatron-core is made of weights of transformers, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


class Rule:
    """The plain case: one weight under another name.

    Attributes:
        parameter: The name in megatron-core, with `{}` for the number of the layer in the whole model.
        names: The names in transformers, with `{}` likewise.
        stride: How many blocks of the first dimension are each split over the tensor-parallel ranks.
        saved: Whether the way back takes this parameter; a copy of another one is left out.
    """

    stride = 1
    saved = True

    def __init__(self, parameter: str, *names: str) -> None:
        self.parameter = parameter
        self.names = names

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The whole parameter, which has this shape over all tensor-parallel ranks."""
        return weights[0]

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """The weights of a whole parameter, in the order of the names."""
        return [parameter]


class Transposed(Rule):
    """The weight of GPT-2's `Conv1D`, which has the inputs first."""

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        return weights[0].t()

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return [parameter.t()]


class Vocabulary(Rule):
    """Rows of a vocabulary, which megatron-core has padded so that all ranks get the same number. Padding is zero."""

    def __init__(self, parameter: str, name: str, size: int) -> None:
        super().__init__(parameter, name)
        self.size = size

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        missing = shape[0] - weights[0].shape[0]
        return pad(weights[0], (0, 0) * (weights[0].dim() - 1) + (0, missing))

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return [parameter[: self.size]]


class TiedVocabulary(Vocabulary):
    """The last pipeline stage's copy of the embeddings."""

    saved = False


class Gated(Rule):
    """The gate and the linear half of a gated MLP, of which each rank has both."""

    stride = 2

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        return torch.cat(list(weights))

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return parameter.chunk(2)


class Heads(Rule):
    """Projections of attention, which megatron-core keeps group by group: queries, key, value, queries, key, value...

    sizes: the rows of each projection. groups: how many groups there are (as many as heads of keys).
    """

    def __init__(self, parameter: str, *names: str, sizes: Sequence[int], groups: int) -> None:
        super().__init__(parameter, *names)
        self.sizes = list(sizes)
        self.groups = groups

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        grouped = [weight.unflatten(0, (self.groups, -1)) for weight in weights]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        grouped = parameter.unflatten(0, (self.groups, -1))
        return [part.flatten(0, 1) for part in grouped.split([size // self.groups for size in self.sizes], dim=1)]


class FusedHeads(Heads):
    """The same for GPT-2, which has the three projections in one `Conv1D`."""

    def join(self, weights: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        return super().join(weights[0].t().split(self.sizes), shape)

    def split(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.cat(list(super().split(parameter))).t()]
