"""Helpers for tests of programs that use accelerate."""

from accelerate.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
