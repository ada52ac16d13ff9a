"""Reading files of `torch.save` as data: no code in them is run, and what is refused is named.

NumPy's reconstruction functions trust the file: that its bytes are pointers to objects, or that there are more bytes
than there are. So they are replaced by stand-ins that accept numbers and text only. After reading, `_with_arrays`
replaces the stand-ins in the content by real arrays and dtypes.
"""

from __future__ import annotations

import codecs
import collections
import datetime
import io
import operator
import os
import pathlib
import pickletools
import re
import sys
import threading
import zipfile
from _compat_pickle import IMPORT_MAPPING as PYTHON_3_NAMES
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch

from accelerate.errors import CheckpointError, MissingFile, a_kind_of
from accelerate.io import disk
from accelerate.torch_internals.serialization import names_taken


class _Dtype:
    """Stands in for a dtype, given by its name; of its pickled state only the byte order is used."""

    made = 0
    __hash__ = None  # type: ignore[assignment]  # `_with_arrays` looks at what is in containers, and not at their keys

    dtype: np.dtype[Any]

    def __new__(cls, name: str, align: bool = False, copy: bool = False) -> _Dtype:
        self = super().__new__(cls)
        self.dtype = np.dtype(str(name))
        if self.dtype.kind not in "biufcSU":
            raise UnpicklingError(f"Can only read numbers and text of NumPy, but got {type(self.dtype)}")
        _Dtype.made += 1
        return self

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """Stands in for an array, which its pickled state fills."""

    filled = False

    def __new__(cls, *args: Any) -> _Array:
        raise ValueError("a NumPy array is not built the way NumPy writes it")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if self.filled:  # which would free the memory that a tensor may have been made of
            raise ValueError("a NumPy array is filled twice")
        super().__setstate__((1, shape, _dtype(kind), fortran, content))
        self.filled = True

    def __reduce__(self) -> Any:
        """Pickles as a plain array, if it stayed inside an object that `_with_arrays` does not search."""
        return self.view(np.ndarray).__reduce__()


def _dtype(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, _Dtype):
        raise ValueError(f"{a_kind_of(kind)} takes the place of a NumPy dtype")
    return kind.dtype


def _empty(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise ValueError("a NumPy array has an unexpected class")
    return np.empty(0, "b").view(_Array)


def _number(kind: Any, content: bytes) -> Any:
    return np.float64(0).__reduce__()[0](_dtype(kind), content)


# By the names that files ask for. NumPy has moved its functions in 2.0.
_STAND_INS: dict[str, Any] = {"numpy.dtype": _Dtype, "numpy.ndarray": _Array}
for _core in ("core", "_core"):
    _STAND_INS |= {f"numpy.{_core}.multiarray._reconstruct": _empty, f"numpy.{_core}.multiarray.scalar": _number}


# What a file may contain beyond tensors and plain values: NumPy's arrays and numbers, the states of its generators, and
# types of Python that hold values and do nothing.
TORCH_SAFE_GLOBALS: list[Any] = [
    *(int, float, bool, str, bytes, list, tuple, dict, set, frozenset, range),
    *(collections.Counter, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
    *((np.array(0).__reduce__()[0], name) for name in _STAND_INS if name.endswith("._reconstruct")),
    *((np.float64(0).__reduce__()[0], name) for name in _STAND_INS if name.endswith(".scalar")),
    np.ndarray,
    codecs.encode,
    np.dtype,
    *dict.fromkeys(type(np.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"),
]


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file that `torch.save` wrote.

    By default only tensors, plain values, and NumPy arrays and numbers are allowed in it.

    Args:
        f: a path, or an open file.
        map_location: as in `torch.load`.
        **kwargs: other arguments of `torch.load`.

    Returns:
        The object.
    """
    kwargs.setdefault("weights_only", True)
    with reading():
        before = _Dtype.made
        content = torch.load(f, map_location=map_location, **kwargs)
        if _Dtype.made == before:
            return content
        return _with_arrays(content, {_itself(kind) for kind in torch.serialization.get_safe_globals()})


@contextmanager
def reading() -> Iterator[None]:
    """A context in which files may use safe types and those the script allows, with NumPy's stand-ins."""
    with _reading:  # torch has one list for all threads
        allowed = torch.serialization.get_safe_globals()
        given = [kind for kind in (*allowed, *TORCH_SAFE_GLOBALS) if not _is_of_arrays(kind)]
        given += [(kind, name) for name, kind in _STAND_INS.items()]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(given)
        try:
            yield
        finally:
            added = set(torch.serialization.get_safe_globals()) - set(given)  # by modules that were imported meanwhile
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([*allowed, *added])


_reading = threading.RLock()


def name_of(kind: Any) -> str:
    """The name by which a file refers to an allowed type."""
    return kind[1] if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}"


def _is_of_arrays(kind: Any) -> bool:
    """Whether a type has a stand-in, or is a class of dtypes, which would create real ones."""
    return name_of(kind) in _STAND_INS or isinstance(_itself(kind), type(np.dtype))


def _itself(kind: Any) -> Any:
    return kind[0] if isinstance(kind, tuple) else kind


def _with_arrays(content: Any, allowed: Container[Any]) -> Any:
    """The content of a file with real arrays and dtypes. allowed: the classes whose instances may be in it."""
    seen: dict[int, tuple[Any, Any]] = {}  # what was looked at, which must not go meanwhile, and what it is now

    def look(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) not in seen:
            seen[id(value)] = value, value  # it may be in itself
            seen[id(value)] = value, replaced(value)
        return seen[id(value)][1]

    def replaced(value: Any) -> Any:
        if isinstance(value, _Dtype):
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


def read_torch(path: Path, map_location: Any = "cpu", **kwargs: Any) -> Any:
    """Read a file of tensors and plain values. Anything else in it is refused, by name."""
    with explaining(path):
        disk.check_plain(path)
        return load(path, map_location=map_location, **kwargs)


_LARGE = 1 << 20  # of a tensor whose content is read later, straight to where it goes
# How the names of members begin that hold many small tensors (see `torch_format`).
TOGETHER = "small"


class Opened(io.BufferedReader):
    """A file of `torch.save` whose large tensors are allocated, but not read yet.

    content: the content. places: for the address of each such storage, its offset in the file and its bytes.
    together: the addresses of storages that tensors share in the file only (see `torch_format`).
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(os.fspath(path)))  # errors show this text
        with self:
            self.places: dict[int, tuple[int, torch.Tensor]] = {}
            self.together: set[int] = set()
            self._records, self._together = _records(path)
            self._next = self._header = -1
            # Its memory is written to later on, so it stays, also where the file itself has dropped a tensor.
            self._storages: list[Any] = []
            self.content = load(self, map_location=self._kept if self._records else "cpu")

    def _kept(self, storage: Any, location: str) -> Any:
        self._storages.append(storage)
        return storage

    def readinto(self, buffer: Any) -> int:
        """What torch calls to read a member."""
        at = self.tell()
        size, self._next = self._next, self._records.get(at, -1)
        header, self._header = self._header, at
        # torch reads the header of a member, and then all of it into the memory of a tensor.
        if len(buffer) == size and self._next < 0:
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            if header in self._together:
                self.together.add(memory.data_ptr())
            self.places[memory.data_ptr()] = (at, memory)
            self.seek(size, os.SEEK_CUR)
            return size
        return super().readinto(buffer)


def _records(path: Path) -> tuple[dict[int, int], set[int]]:
    """The offsets of the members to read later, with their sizes, and those that hold many small tensors.

    Members are read later if they are large or hold many small tensors, but not if torch must see their content.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        pickled = next((member for member in members if member.filename.endswith("/data.pkl")), None)
        # Sparse tensors are looked at by torch when they are made, and others are made for a device that it asks for.
        if pickled is None or re.search(b"sparse|_rebuild_(wrapper|device)", archive.read(pickled)):
            return {}, set()
        # What a machine with another order of bytes has written is turned round when it is read.
        order = next((member for member in members if member.filename.endswith("/byteorder")), None)
        if order is not None and archive.read(order) != sys.byteorder.encode():
            return {}, set()
        stored = [m for m in members if "/data/" in m.filename and m.compress_type == zipfile.ZIP_STORED]
        together = {member.header_offset for member in stored if f"/data/{TOGETHER}" in member.filename}
        noted = [member for member in stored if member.file_size >= _LARGE or member.header_offset in together]
        return {member.header_offset: member.file_size for member in noted}, together


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """A context that turns errors of reading a file into a CheckpointError of one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise missing(path) from None
    except Exception as error:
        asked = _asked_for(path, error)
        if asked is not None:
            way = "allow it with `torch.serialization.add_safe_globals`"
            # What torch never allows, as 1.x wrote it, and arrays of objects.
            if re.search("Can only (append|extend|SETITEM|read)", str(error)):
                way = "load it with `load_kwargs={'weights_only': False}`, and save it again"
            raise CheckpointError(
                f"{path} contains {asked}, which is neither a tensor nor a plain value, and is not loaded: "
                f"if you trust the file, {way}."
            ) from error
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {first_line(error)}): load another checkpoint."
        ) from error


def missing(path: Path) -> CheckpointError:
    return MissingFile(f"{path} is missing: put it back, or load another checkpoint.")


_REFUSED = "Weights only load failed"


def first_line(error: BaseException) -> str:
    text = str(error)
    if _REFUSED in text:  # torch advises to read it in another way, which would run what is in the file
        text = text.partition("WeightsUnpickler error:")[2].strip() or _REFUSED
    return (text.splitlines() or [""])[0].rstrip(".")


def named_in(error: Exception) -> str | None:
    named = re.search(r"(?:GLOBAL |but got <class ')([\w.<>]+)", str(error))
    return None if named is None else named.group(1)


def _asked_for(path: Path, error: Exception) -> str | None:
    """The name that a refused file asked for."""
    if (named := named_in(error)) is not None:
        return named
    if _REFUSED not in str(error):
        return None
    # An older or newer kind of pickle, which is refused without a look at its names.
    always = names_taken()
    if always is None:
        return None
    taken = {*always, *map(name_of, TORCH_SAFE_GLOBALS)}
    with suppress(Exception):  # a damaged one
        return next(name for name in _names_in(path) if name not in taken)
    return None


def _names_in(path: Path) -> Iterator[str]:
    """The global names in the pickles of a `torch.save` file, in order."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    else:
        pickled = disk.read_text(path)
    file = io.BytesIO(pickled)
    while file.tell() < len(pickled):
        words: list[str] = []
        memo: dict[int, str] = {}
        for operation, argument, _ in pickletools.genops(file):
            if operation.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                yield f"{PYTHON_3_NAMES.get(module, module)}.{name}"  # protocol 2 has the names of Python 2
            elif operation.name == "STACK_GLOBAL":
                yield ".".join(words[-2:])
            elif operation.name == "MEMOIZE":
                memo[len(memo)] = words[-1] if words else ""
            elif "PUT" in operation.name:
                memo[int(argument or 0)] = words[-1] if words else ""
            elif "GET" in operation.name:
                words.append(memo.get(int(argument or 0), ""))
            elif operation.stack_after == [pickletools.pyunicode]:
                words.append(str(argument))
