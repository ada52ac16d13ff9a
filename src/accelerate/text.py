"""Small things about words and dictionaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping, Sequence
from functools import reduce
from typing import Any

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def convert_bytes(size: float) -> str:
    """Format a number of bytes for people, such as `1.46 KB`.

    Args:
        size: the number of bytes.
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def in_binary_units(size: float) -> str:
    """A size in units that `convert_file_size_to_int` reads alike, such as `1.46 KiB`."""
    return convert_bytes(size).replace("B", "iB")


def convert_file_size_to_int(size: int | str) -> int:
    """Convert a size such as "10GB" to a number of bytes.

    Args:
        size: a number, or a string with a unit: GB is 10^9 bytes, GiB is 2^30 bytes, Gb is 10^9 bits.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]+)\s*", str(size))
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(
            f"The size {size!r} cannot be read: give a number of bytes, or a number and a unit as in '5GB'."
        )
    unit = match.group(2)
    amount = int(float(match.group(1)) * _UNITS[unit.upper()])
    bits = unit.endswith("b") and not unit.upper().endswith("IB")
    return amount // 8 if bits else amount


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns what to add to an error about a word that is not known: the one it nearly is, if there is one."""
    from difflib import get_close_matches

    names = list(known)
    # In short words, two letters that have changed places are already too much of it.
    near = get_close_matches(word, names, n=1, cutoff=0.75) or [n for n in names if sorted(n) == sorted(word)]
    return f" (did you mean `{near[0]}`?)" if near else ""


def some_of(names: Sequence[str], most: int = 16) -> str:
    """Returns names for a sentence: of very many, those that are given first, and how many more there are."""
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more} more"


def differences(**kinds: Sequence[str]) -> str:
    """Returns what is wrong with a set of names for a sentence, kind by kind, without the kinds that have none."""
    return "; ".join(f"{kind.replace('_', ' ')}: {some_of(names, 5)}" for kind, names in kinds.items() if names)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of the class of any other object.

    Args:
        obj: the object.
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: MutableMapping[Any, Any], destination: MutableMapping[Any, Any]) -> Any:
    """Merge one nested dict into another.

    Args:
        source: the dict whose entries are added.
        destination: the dict that is changed.

    Returns:
        `destination`.
    """
    for key, value in source.items():
        if isinstance(value, MutableMapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Follow a dotted path of attributes.

    Args:
        obj: the object to start from.
        attr: the path, such as "layer.weight".
    """
    return reduce(getattr, attr.split("."), obj)
