"""Reads the journals that Weights & Biases and SwanLab keep offline: records in the framing of LevelDB's log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEADER = 7  # of the file, and of each piece of a record: check sum, length, kind
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


def records(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    position, record = _HEADER, b""
    while position + _HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER:  # no piece starts this late in a block
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        piece = content[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if kind in (_FULL, _LAST):
            yield record
