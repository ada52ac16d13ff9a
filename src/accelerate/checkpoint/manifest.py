"""The file that makes a folder a checkpoint: what is in it, and what it was written by."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import accelerate
from accelerate.checkpoint import layout
from accelerate.constants import RNG_STATE_NAME
from accelerate.errors import CheckpointError
from accelerate.io import blocks
from accelerate.io.blocks import Entry
from accelerate.io.disk import is_inside, open_plain, read_json
from accelerate.io.safe_load import explaining

_FORMAT = 1


def _versions() -> dict[str, str]:
    return {
        "accelerate": accelerate.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Manifest:
    files: dict[str, Entry]
    world_size: int
    strategy: str
    # Which save it is of: the same on machines that share no disk.
    save: str = ""
    # When, in seconds since 1970; later than the others of its project, whatever the clock says. 0: that is not known.
    saved: float = 0.0
    versions: dict[str, str] = field(default_factory=_versions)

    def write(self, path: Path) -> None:
        content: dict[str, Any] = {
            "format": _FORMAT,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "save": self.save,
            "saved": self.saved,
            "versions": self.versions,
            "files": {name: entry._asdict() for name, entry in sorted(self.files.items())},
        }
        content["crc32"] = _sum(content)
        blocks.write_file(path, [json.dumps(content, indent=1).encode()])

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder; None where a 1.x release, which writes none, has saved last."""
        path = folder / layout.MANIFEST
        try:
            if _is_of_torch(folder / layout.random_states(0)):
                return None
            content: dict[str, Any] = read_json(path)
            if content["format"] > _FORMAT:
                raise CheckpointError(
                    f"{path} has format {content['format']}, and this version of accelerate reads up to {_FORMAT}: "
                    "use the version that wrote it, or a newer one."
                )
            if content.pop("crc32") != _sum(content):
                raise ValueError("its checksum is not the one it was written with")
            files = {str(name): Entry(int(e["size"]), list(e["crc32"])) for name, e in content["files"].items()}
            if outside := [name for name in files if not is_inside(name)]:
                raise ValueError(f"{outside[0]!r} is not in its folder")
            return cls(
                files,
                int(content["world_size"]),
                str(content["strategy"]),
                str(content.get("save", "")),
                float(content.get("saved", 0)),
                dict(content["versions"]),
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): load another checkpoint.") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}): load another checkpoint."
            ) from error

    def check(self, folder: Path, names: Iterable[str] | None = None, *, contents: bool = True) -> None:
        """Raise for a file that is missing or is not what was written. contents: compare checksums too."""
        for name in sorted(self.files if names is None else names):
            expected, path = self.files[name], folder / name
            try:
                size = path.stat().st_size
            except OSError:
                raise CheckpointError(
                    f"{path} is missing, so this checkpoint is not complete: put it back, or load another one."
                ) from None
            if size != expected.size:
                raise CheckpointError(
                    f"{path} has {size} bytes where {expected.size} were written: copy the checkpoint again, load "
                    f"another one, or if it was replaced on purpose, delete {layout.MANIFEST}."
                )
            if contents and len(expected.crc32) != -(-expected.size // blocks.BLOCK):
                raise CheckpointError(f"{folder / layout.MANIFEST} is damaged: load another checkpoint.")
            if contents:
                with explaining(path):
                    blocks.read_file(path, entry=expected)


def _sum(content: dict[str, Any]) -> int:
    """The checksum of a manifest, which does not depend on how it is laid out."""
    return blocks.crc32(json.dumps(content, sort_keys=True).encode())


def files_since(folder: Path) -> list[str]:
    """The files of a 1.x release that has saved over a checkpoint with a manifest: without what is left of that one."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [
        name
        for name in names
        if not name.startswith((*layout.UNKNOWN_TO_1_X, RNG_STATE_NAME)) or _is_of_torch(folder / name)
    ]


def _is_of_torch(path: Path) -> bool:
    """Whether `torch.save` has written a file: it names what is in an archive after that, and this package does not."""
    start = 30  # of the first name in an archive
    name = f"{path.stem}/".encode()
    try:
        with open_plain(path) as file:
            return file.read(start + len(name))[start:] == name
    except OSError:
        return False
