"""Comparing versions of packages."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from accelerate.constants import STR_OPERATION_TO_FUNC

if TYPE_CHECKING:
    from packaging.version import Version


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package with another version.

    Args:
        library_or_version: the name of the package, or a parsed version.
        operation: the operator: "<", "<=", "==", "!=", ">=" or ">".
        requirement_version: the version to compare with.
    """
    from packaging.version import parse

    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"{operation!r} compares no versions; use one of {', '.join(STR_OPERATION_TO_FUNC)}.")
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with another version.

    Args:
        operation: the operator: "<", "<=", "==", "!=", ">=" or ">".
        version: the version to compare with.
    """
    return compare_versions("torch", operation, version)


torch_version: Version

if not TYPE_CHECKING:  # names that are not declared above are errors

    def __getattr__(name: str) -> Any:
        # Asked for by scripts alone, and found in the package's files.
        if name == "torch_version":
            from packaging.version import parse

            return parse(importlib.metadata.version("torch"))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
