"""fp8: a library computes the products of linear layers in 8 bits, and everything around them is cast to bf16."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence

import torch

from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import Recipe
from accelerate.devices import Device
from accelerate.logging import get_logger
from accelerate.precision.autocast import Autocast
from accelerate.precision.base import Precision, PrecisionSettings

logger = get_logger(__name__)

_VARIABLE = "ACCELERATE_FP8_BACKEND"
# The smallest piece of a matrix that the hardware multiplies in fp8.
PIECE = 16


class Fp8(Autocast):
    """What all libraries have in common. One of them says what it needs, and converts models in `convert`."""

    mode = "fp8"
    dtype: torch.dtype = torch.bfloat16
    title: str  # what people call the library
    package: str  # as it is installed
    recipe_kind: type[Recipe]

    def __init__(self, device: Device, settings: PrecisionSettings) -> None:
        super().__init__(device, settings)
        recipe = self.recipe_kind() if settings.recipe is None else settings.recipe
        assert isinstance(recipe, Recipe)
        self.recipe = recipe

    @classmethod
    def chosen(cls, kinds: Sequence[type[Precision]], device: Device, settings: PrecisionSettings) -> type[Precision]:
        asked = _asked(settings.recipe)
        if asked is not None:
            return next(kind for kind in kinds if kind.fp8_backend == asked)
        best, why = best_of(kinds, device)
        if best is None:
            raise ValueError(
                f"mixed_precision='fp8' is not available here ({why}): use 'bf16', or provide what one of them lacks."
            )
        logger.warning_once(f"fp8 is computed by {why}: name one with `--fp8_backend` or a recipe to choose another.")
        return best

    @classmethod
    def lacks(cls, device: Device) -> str | None:
        """Why this library cannot compute here; None where it can."""
        return device.lacks_fp8()

    def check(self, device: Device) -> None:
        why = self.lacks(device)
        if why is not None:
            raise ValueError(
                f"mixed_precision='fp8' is not available with {self.title} here, since {why}: use another library, or "
                "'bf16'."
            )


def best_of(kinds: Sequence[type[Precision]], device: Device) -> tuple[type[Precision] | None, str]:
    """The first of these libraries that can compute here, and why it is that one; None, and why not."""
    libraries = [kind for kind in kinds if issubclass(kind, Fp8)]
    lacks: list[str] = []
    for kind in libraries:
        why = kind.lacks(device)
        if why is None:
            version = importlib.metadata.version(kind.package)
            names = ", ".join(each.title for each in libraries)
            others = "".join(f"; {each}" for each in lacks)
            return kind, f"{kind.title} {version}, the first of {names} that is installed and runs here{others}"
        lacks.append(f"{kind.title}: {why}")
    return None, "; ".join(lacks)


def _asked(recipe: object) -> FP8BackendType | None:
    """The library that somebody has named; None where it is for us to choose."""
    if isinstance(recipe, Recipe):
        return recipe.library()
    name = os.environ.get(_VARIABLE, "auto").upper()
    if name in ("AUTO", "NO"):
        return None
    if name not in FP8BackendType.__members__:
        raise ValueError(f"{_VARIABLE} is {name.lower()!r}: choose one of auto, ao, te, msamp.")
    return FP8BackendType(name)
