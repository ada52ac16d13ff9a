"""Everything that tests of clients import, under its public path."""

from accelerate.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
