"""Models that are bigger than a device: without weights first, then mapped, loaded and run where there is room."""

from __future__ import annotations

from accelerate.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
