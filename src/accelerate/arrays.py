"""Arrays, numbers and dtypes of NumPy in files.

NumPy's own functions believe what a file says: that its bytes are addresses of objects, or that there are more of them
than there are. So a file gets what is here in their place, which takes numbers and text alone. When all is read, `real`
puts NumPy's own things into the contents.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Container
from pickle import UnpicklingError
from typing import Any

import numpy as np


class _Kind:
    """A dtype. It is what its name says: of all else that a file says of it, only the order of bytes counts."""

    made = 0
    __hash__ = None  # type: ignore[assignment]  # `real` looks at what is in containers, and not at their keys

    dtype: np.dtype[Any]

    def __new__(cls, name: str, align: bool = False, copy: bool = False) -> _Kind:
        self = super().__new__(cls)
        self.dtype = np.dtype(str(name))
        if self.dtype.kind not in "biufcSU":
            raise UnpicklingError(f"Can only read numbers and text of NumPy, but got {type(self.dtype)}")
        _Kind.made += 1
        return self

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """An array, of which the file says what is in it."""

    filled = False

    def __new__(cls, *args: Any) -> _Array:
        raise ValueError("an array of NumPy is not made as NumPy writes it")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if self.filled:  # which would free the memory that a tensor may have been made of
            raise ValueError("an array of NumPy is filled twice")
        super().__setstate__((1, shape, _dtype(kind), fortran, content))
        self.filled = True

    def __reduce__(self) -> Any:
        """As any array, where it has stayed in something that `real` cannot look into."""
        return self.view(np.ndarray).__reduce__()


def _dtype(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, _Kind):
        raise ValueError(f"a {type(kind).__name__} is in the place of a dtype of NumPy")
    return kind.dtype


def _empty(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise ValueError("an array of NumPy is of another class")
    return np.empty(0, "b").view(_Array)


def _number(kind: Any, content: bytes) -> Any:
    return np.float64(0).__reduce__()[0](_dtype(kind), content)


# By the names that files ask for. NumPy has moved its functions in 2.0.
NAMES: dict[str, Any] = {"numpy.dtype": _Kind, "numpy.ndarray": _Array}
for _core in ("core", "_core"):
    NAMES |= {f"numpy.{_core}.multiarray._reconstruct": _empty, f"numpy.{_core}.multiarray.scalar": _number}


def count() -> int:
    """How many things of NumPy were read so far."""
    return _Kind.made


def real(content: Any, allowed: Container[Any]) -> Any:
    """The contents of a file with NumPy's own things in them. allowed: classes of which a file may make objects."""
    seen: dict[int, tuple[Any, Any]] = {}  # what was looked at, which must not go meanwhile, and what it is now

    def look(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) not in seen:
            seen[id(value)] = value, value  # it may be in itself
            seen[id(value)] = value, replaced(value)
        return seen[id(value)][1]

    def replaced(value: Any) -> Any:
        if isinstance(value, _Kind):
            return value.dtype
        if isinstance(value, _Array):
            return np.array(value)
        if type(value) is tuple:
            items = tuple(map(look, value))
            return value if all(map(operator.is_, items, value)) else items
        holder = value
        if type(value) in allowed and not isinstance(value, dict):
            holder = getattr(value, "__dict__", value)
        if isinstance(holder, dict) or type(holder) in (list, deque):
            for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                if (other := look(item)) is not item:
                    holder[key] = other
        return value

    return look(content)


_PLAIN = (int, float, bool, str, bytes, type(None))
