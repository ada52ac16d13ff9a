"""The name of every file and folder of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

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
    """The file of a sharded model that is saved as a whole."""
    return _numbered(FSDP_MODEL_NAME, number, ".bin")


def own_model(number: int, rank: int) -> str:
    """What one process holds of a model, where each writes a file of its own."""
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
    """How far the accumulation and the loaders of a rank were, where that is not beside its random states."""
    return f"progress_{rank}.bin"


def gradients(rank: int) -> str:
    """What a rank had accumulated, when it was saved in the middle of a window."""
    return f"gradients_{rank}.safetensors"


def gradient_shards() -> str:
    """What all ranks together had accumulated, of sharded models."""
    return "gradients_fsdp"


def automatic(project_dir: Path, number: int) -> Path:
    return project_dir / CHECKPOINTS / f"checkpoint_{number}"


def automatic_number(folder: Path) -> int | None:
    """The number in the name of a folder that was named automatically, None for other names."""
    match = _AUTOMATIC.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def automatic_folders(project_dir: Path) -> list[Path]:
    """The automatically named checkpoints of a project, oldest first."""
    parent = project_dir / CHECKPOINTS
    found = [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    return sorted(
        (path for path in found if automatic_number(path) is not None), key=lambda p: automatic_number(p) or 0
    )
