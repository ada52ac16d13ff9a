"""Small things about words and dictionaries."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import reduce
from typing import Any


def convert_bytes(size: float) -> str:
    """Writes a number of bytes for people: `1.46 KB`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Returns the name of a class or function, or of the class of anything else."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: MutableMapping[Any, Any], destination: MutableMapping[Any, Any]) -> Any:
    """Puts the entries of one nested dictionary into another, which is returned."""
    for key, value in source.items():
        if isinstance(value, MutableMapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Follows a dotted path of attributes."""
    return reduce(getattr, attr.split("."), obj)
