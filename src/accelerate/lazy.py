"""Packages whose names and submodules are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(package: str, names: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package. names: where each public name lives."""
    attributes = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name in names:
            value = getattr(importlib.import_module(names[name]), name)
            attributes[name] = value
            return value
        module = f"{package}.{name}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Only the lack of this very module is an unknown name; a package that it needs is another matter.
            if error.name != module:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def known() -> list[str]:
        return sorted({*attributes, *names})

    return find, known
