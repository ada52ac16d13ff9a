"""The exceptions and warnings of the package, in one small tree."""

from __future__ import annotations

import pickle
import sys
import warnings


class DistributedOperationException(Exception):
    """The ranks disagree about a collective: its kind, its shapes or its dtypes. Raised alike on every rank."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was given where padding was asked for; it is returned as it came."""


class NotYetSupported(NotImplementedError):
    """A feature of the public surface whose engine is not part of this version."""

    def __init__(self, feature: str, instead: str) -> None:
        super().__init__(f"{feature} is not part of this version of accelerate: {instead}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be loaded. Nothing was lost, nor half-loaded unless it says so."""


class WrongFolder(CheckpointError, ValueError):
    """The folder of a checkpoint that was asked for cannot be, or none was given. All ranks say the same of it."""


class MissingFile(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is not there."""


class Unfit(ValueError, RuntimeError):
    """What was given does not fit what torch has here: a device that it lacks, weights without values or of other
    shapes. It is a RuntimeError, too, since that is what torch itself raises."""


class UnknownName(ValueError, KeyError):
    """A name that is none of those to choose from. It is a KeyError, too, as if it had been looked up."""

    __str__ = Exception.__str__  # that of a KeyError would put it in quotes


class WrongHandler(ValueError, AssertionError):
    """Something in `kwargs_handlers` that is no handler."""


class CannotPickle(pickle.PicklingError, TypeError):
    """Something that only means anything in this process."""


class CommandFailed(RuntimeError):
    """A command cannot do what it was asked to. Its message is for the person who typed it."""


class NotInstalled(CommandFailed, ImportError):
    """A command needs a package or a program that is not here."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the line outside of this package, and of torch, that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("accelerate", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
