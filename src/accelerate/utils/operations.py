"""Collectives on nested data, under their public path."""

import accelerate.state  # noqa: F401  (says how processes find each other)
from accelerate.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
