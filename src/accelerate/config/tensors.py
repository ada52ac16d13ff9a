"""What one process tells the others about a tensor before it sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor.

    Args:
        shape: the shape.
        dtype: the dtype.
    """

    shape: torch.Size
    dtype: torch.dtype
