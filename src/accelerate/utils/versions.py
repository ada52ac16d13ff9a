"""Comparing versions, under its public path."""

from accelerate.constants import STR_OPERATION_TO_FUNC
from accelerate.versions import compare_versions, is_torch_version

__all__ = [
    "STR_OPERATION_TO_FUNC",
    "compare_versions",
    "is_torch_version",
]
