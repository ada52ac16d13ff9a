"""What is in a checkpoint: the name of every file and folder, and the manifest that lists them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import accelerate
from accelerate.constants import (
    FSDP_MODEL_NAME,
    MANIFEST_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from accelerate.errors import CheckpointError
from accelerate.io import blocks
from accelerate.io.blocks import FileEntry
from accelerate.io.disk import is_inside, open_plain, read_json
from accelerate.io.read_tensors import read_file
from accelerate.io.safe_load import explaining

# Inside a checkpoint, beside the files whose names are those of older releases.
MANIFEST = MANIFEST_NAME

# Around one: where it grows, where a finished one waits to replace another, where an old one goes to be deleted.
STAGING = ".staging-"
COMMITTED = ".accelerate-committed"
DELETING = ".deleting-"

# Files of models and optimizers as a whole.
WHOLE = re.compile(rf"(?:{SAFE_MODEL_NAME}|{MODEL_NAME}|{OPTIMIZER_NAME})(?:_\d+)?\.(?:safetensors|bin)")

# How files begin that the 1.x releases do not have.
UNKNOWN_TO_1_X = ("progress_", "gradients_")

# What each rank has written by itself, also into folders that all of them write together.
_OF_ONE_RANK = re.compile(
    r"(?:random_states_|progress_|gradients_|\w+/__|\w+/(?:bf16_)?zero_pp_rank_)(\d+)(?:_\d+|_mp_rank_\w+)?\.\w+"
)

CHECKPOINTS = "checkpoints"
_AUTOMATIC = re.compile(r"checkpoint_(\d+)")


def _numbered(name: str, number: int, suffix: str) -> str:
    return f"{name}{suffix}" if number == 0 else f"{name}_{number}{suffix}"


def model(number: int, safe: bool) -> str:
    return _numbered(SAFE_MODEL_NAME, number, ".safetensors") if safe else _numbered(MODEL_NAME, number, ".bin")


def optimizer(number: int) -> str:
    return _numbered(OPTIMIZER_NAME, number, ".bin")


def model_shards(number: int) -> str:
    """The folder of a model that is saved in shards."""
    return f"{FSDP_MODEL_NAME}_{number}"


def optimizer_shards(number: int) -> str:
    return f"{OPTIMIZER_NAME}_{number}"


def engine_folder(number: int) -> str:
    """The folder of a model that an engine writes with its optimizer, in a layout of its own."""
    return _numbered(MODEL_NAME, number, "")


def gathered_model(number: int) -> str:
    """The file of a sharded model that is saved as a full state dict."""
    return _numbered(FSDP_MODEL_NAME, number, ".bin")


def own_model(number: int, rank: int) -> str:
    """The file with one rank's shard of a model, where each rank writes its own."""
    return _numbered(FSDP_MODEL_NAME, number, f"_rank{rank}.bin")


def own_optimizer(number: int, rank: int) -> str:
    return _numbered(OPTIMIZER_NAME, number, f"_rank{rank}.bin")


def scheduler(number: int) -> str:
    return _numbered(SCHEDULER_NAME, number, ".bin")


def stateful_loader(number: int) -> str:
    return _numbered("dl_state_dict", number, ".bin")


def scaler() -> str:
    return SCALER_NAME


def random_states(rank: int) -> str:
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom(number: int) -> str:
    return f"custom_checkpoint_{number}.pkl"


def progress(rank: int) -> str:
    """The progress of a rank's accumulation and loaders, if it is not in the file of its random states."""
    return f"progress_{rank}.bin"


def gradients(rank: int) -> str:
    """The gradients that a rank had accumulated, of a save inside an accumulation window."""
    return f"gradients_{rank}.safetensors"


def gradient_shards() -> str:
    """The folder of the accumulated gradients of sharded models."""
    return "gradients_fsdp"


def rank_of(name: str) -> int | None:
    """The rank that has written a file; None for a file of the main process."""
    found = _OF_ONE_RANK.fullmatch(name)
    return None if found is None else int(found.group(1))


def automatic(project_dir: Path, number: int) -> Path:
    return project_dir / CHECKPOINTS / f"checkpoint_{number}"


def automatic_number(folder: Path) -> int | None:
    """The number in the name of an automatically named folder; None for other names."""
    match = _AUTOMATIC.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def automatic_folders(project_dir: Path) -> list[Path]:
    """The automatically named checkpoints of a project, oldest first."""
    return numbered_folders(project_dir / CHECKPOINTS)


def numbered_folders(parent: Path) -> list[Path]:
    """The automatically named checkpoints in a folder, oldest first."""
    found = [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    return sorted(
        (path for path in found if automatic_number(path) is not None), key=lambda p: automatic_number(p) or 0
    )


_FORMAT = 1


def _versions() -> dict[str, str]:
    return {
        "accelerate": accelerate.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Manifest:
    files: dict[str, FileEntry]
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
        """The manifest of a folder; None if the last save was by a 1.x release, which writes none."""
        path = folder / MANIFEST
        try:
            if _is_of_torch(folder / random_states(0)):
                return None
            content: dict[str, Any] = read_json(path)
            if content["format"] > _FORMAT:
                raise CheckpointError(
                    f"{path} has format {content['format']}, but this version of accelerate reads formats up to "
                    f"{_FORMAT}: use the version that wrote it, or a newer one."
                )
            if content.pop("crc32") != _sum(content):
                raise ValueError("its checksum is not the one it was written with")
            files = {str(name): FileEntry(int(e["size"]), list(e["crc32"])) for name, e in content["files"].items()}
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
        """Raise for a file that is missing or changed. contents: compare checksums, not only sizes."""
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
                    f"{path} has {size} bytes, but {expected.size} were written: copy the checkpoint again, or load "
                    f"another one; if you replaced the file on purpose, delete {MANIFEST}."
                )
            if contents and len(expected.crc32) != -(-expected.size // blocks.BLOCK):
                raise CheckpointError(f"{folder / MANIFEST} is damaged: load another checkpoint.")
            if contents:
                with explaining(path):
                    read_file(path, entry=expected)


def _sum(content: dict[str, Any]) -> int:
    """The checksum of a manifest, independent of its formatting."""
    return blocks.crc32(json.dumps(content, sort_keys=True).encode())


def files_since(folder: Path) -> list[str]:
    """The files of a 1.x release that has overwritten a checkpoint with a manifest, without leftovers of that."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [
        name for name in names if not name.startswith((*UNKNOWN_TO_1_X, RNG_STATE_NAME)) or _is_of_torch(folder / name)
    ]


def _is_of_torch(path: Path) -> bool:
    """Whether `torch.save` wrote a file: unlike this package, it names the folder in the archive after the file."""
    start = 30  # of the first name in an archive
    name = f"{path.stem}/".encode()
    try:
        with open_plain(path) as file:
            return file.read(start + len(name))[start:] == name
    except OSError:
        return False
