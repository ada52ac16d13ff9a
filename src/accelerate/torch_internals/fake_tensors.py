"""Tensors that have a shape, a dtype and a device, and no content."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from accelerate.torch_internals.missing import gone


def without_content(needed_for: str) -> AbstractContextManager[Any]:
    """A context in which new tensors have no content, and nothing is computed. needed_for: what is lost without it."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise gone(
            "torch._subclasses.fake_tensor.FakeTensorMode",
            needed_for,
            "install a release of torch that accelerate knows",
        ) from None
    return FakeTensorMode(allow_non_fake_inputs=True)
