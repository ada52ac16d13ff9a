"""Installing torch_xla, under its public path."""

from accelerate.machine import install_xla

__all__ = ["install_xla"]
