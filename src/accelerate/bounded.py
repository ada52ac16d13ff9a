"""Reading what anybody may have written: plain files only, no more than they can sensibly hold, names that stay inside.

A device or a pipe under the name of a file would be read, or waited for, without end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import PurePath
from typing import IO, Any

# Far more than the index or the manifest of any model needs.
LARGEST_TEXT = 1 << 28
# What the format allows a header to have.
LARGEST_HEADER = 100_000_000


def open_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a file to read, and refuses whatever else has its name."""
    # A pipe would keep us waiting for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def check_plain(path: str | os.PathLike[str]) -> None:
    """Refuses what is not a plain file, for those who open it by its name."""
    _check(os.stat(path).st_mode, path)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        reason = "Is a directory" if stat.S_ISDIR(mode) else "A device or a pipe, and no file"
        raise OSError(number, reason, os.fspath(path))


def read_text(path: str | os.PathLike[str], largest: int = LARGEST_TEXT) -> bytes:
    """The content of a file that should be small."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest} bytes")
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a file of JSON holds; a ValueError for whatever is wrong with it."""
    return parsed(read_text(path))


def parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def safetensors_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the tensors begin: one after the other, to the end of the file."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > min(LARGEST_HEADER, size):
            raise ValueError(f"its header should have {length} bytes, and the file has {size}")
        header = parsed(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header holds a {type(header).__name__}")
    end = 8 + length + _length_of({name: entry for name, entry in header.items() if name != "__metadata__"})
    if end != size:
        raise ValueError(f"it has {size} bytes and should have {end}")
    return header, 8 + length


def _length_of(entries: dict[str, Any]) -> int:
    """How many bytes the tensors of a header have, which must lie one behind the other."""
    for name, entry in entries.items():
        for numbers in (entry["shape"], entry["data_offsets"]):
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"its header gives {name} the numbers {numbers}, where whole ones belong")
    last = 0
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
        if begin != last:
            raise ValueError(f"its header has {name} begin at byte {begin} and what is before it end at {last}")
        last = end
    return last


def is_inside(name: Any) -> bool:
    """Whether a name is that of a file in the folder it is looked up in; no system has one with a NUL in it."""
    if not isinstance(name, str):
        return False
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
