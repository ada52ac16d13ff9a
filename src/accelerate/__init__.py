"""Run a plain PyTorch training loop on one device or many, without rewriting it.

Names and submodules are imported when they are first used, so that `import accelerate` costs nothing.
"""

from __future__ import annotations

import os
import sys

from accelerate.doors import Package
from accelerate.lazy import lazy

__version__ = "2.0.0"

__getattr__, __dir__, __all__ = lazy(__name__)
sys.modules[__name__].__class__ = Package


def _install_rich_tracebacks() -> None:
    """Let rich draw the tracebacks of uncaught errors, where it was asked for."""
    from accelerate.available import is_rich_available

    if is_rich_available():
        from rich.traceback import install

        install()


if "ACCELERATE_ENABLE_RICH" in os.environ:
    _install_rich_tracebacks()
