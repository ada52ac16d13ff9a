"""Modules whose names are imported when they are first used.

The names of such a module stand in its stub, the `.pyi` beside it, and nowhere else: editors and type checkers read it,
and so does `lazy`. What counts there are imports with a name: `from place import name as name`, or `name as other`.
`from package.module import *` stands for the names in the stub of a module beside this one. A module imported from its
own package (`from package import module as module`) can be reached, but is not a name that a star brings along.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

_IMPORTS = re.compile(r"^from ([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)


def lazy(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, the `__dir__` and the `__all__` of a module that has a stub."""
    attributes = vars(sys.modules[module])
    stub = os.path.splitext(attributes["__file__"])[0] + ".pyi"
    names = _read(stub, attributes["__spec__"].loader)
    package = "__path__" in attributes

    def find(name: str) -> Any:
        place, there = names.get(name, (module, name))
        if place != module:
            attributes[name] = getattr(importlib.import_module(place), there)
            return attributes[name]
        if package:
            submodule = f"{module}.{name}"
            try:
                return importlib.import_module(submodule)
            except ModuleNotFoundError as error:
                # Only the lack of this very module is an unknown name; a package that it needs is another matter.
                if error.name != submodule:
                    raise
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def known() -> list[str]:
        return sorted({*attributes, *names})

    public = sorted(name for name, (place, _) in names.items() if place != module and not name.startswith("_"))
    return find, known, public


def _read(stub: str, loader: Any) -> dict[str, tuple[str, str]]:
    """The names of a stub, each with the module it is imported from and what it is called there."""
    names = {}
    for place, several, one in _IMPORTS.findall(loader.get_data(stub).decode()):
        for entry in (several or one).split(","):
            there, _, name = entry.strip().partition(" as ")
            if there == "*":
                beside = os.path.join(os.path.dirname(stub), place.rpartition(".")[2] + ".pyi")
                names.update({name: (place, name) for name in _read(beside, loader) if not name.startswith("_")})
            elif name:
                names[name] = (place, there)
    return names
