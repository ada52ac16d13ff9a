"""Where `find_executable_batch_size` once was."""

import warnings

from accelerate.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]

warnings.warn(
    "accelerate.memory_utils is deprecated: import find_executable_batch_size from accelerate.",
    FutureWarning,
    stacklevel=2,
)
