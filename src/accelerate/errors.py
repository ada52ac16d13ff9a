"""The exceptions and warnings of the package, in one small tree."""

from __future__ import annotations

import pickle
import sys
import warnings


class DistributedOperationException(Exception):
    """Raised on every rank when ranks disagree about a collective: its kind, its shapes or its dtypes."""

    # Its message says where each rank is, so one of their tracebacks is enough (see launch/worker.py).
    is_of_all_ranks = True


class CannotPadNestedTensorWarning(UserWarning):
    """Warns that a nested tensor cannot be padded, and is returned as it is."""


class NotYetSupported(NotImplementedError):
    """Raised for a feature whose engine is not part of this version.

    Args:
        feature: the feature.
        instead: what to do instead.
    """

    def __init__(self, feature: str, instead: str) -> None:
        super().__init__(f"{feature} is not part of this version of accelerate: {instead}")


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be saved or loaded. Nothing is lost, nor loaded in part unless it says so."""


class WrongFolder(CheckpointError, ValueError):
    """Raised on every rank when the folder for a checkpoint cannot be used, or none is given."""


class MissingFile(CheckpointError, FileNotFoundError):
    """Raised when a file of a checkpoint is missing."""


class Unfit(ValueError, RuntimeError):
    """Raised when something does not fit: a device that is not here, weights without values or with other shapes.

    It is also a RuntimeError, since that is what torch itself raises.
    """


class UnknownName(ValueError, KeyError):
    """Raised for a name that is not one of those to choose from. It is also a KeyError."""

    __str__ = Exception.__str__  # that of a KeyError would put it in quotes


class WrongHandler(ValueError, AssertionError):
    """Raised for something in `kwargs_handlers` that is not a handler."""


class WrongObject(TypeError, AttributeError):
    """Raised for an object that is of another kind. It is also an AttributeError, about what it lacks."""


class CannotPickle(pickle.PicklingError, TypeError):
    """Raised for an object that has a meaning only in this process."""


class CommandFailed(RuntimeError):
    """Raised when a command cannot do what it was asked to. Its message is for the person who typed it."""


class NotInstalled(CommandFailed, ImportError):
    """Raised when a command needs a package or a program that is not installed."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the line that led here, outside of this package, of torch, and of Python's way into a `with`.

    Args:
        message: the sentence.
        category: the class of the warning.
    """
    level, frame, inside = 2, sys._getframe(1), ("accelerate", "torch", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def check_kind(name: str, setting: object, kind: type, otherwise: str = "") -> None:
    """Refuse a setting of another kind; None says that there is none.

    Args:
        name: of the setting.
        setting: what was given.
        kind: its class.
        otherwise: what else may be passed, for the end of the sentence.
    """
    if setting is not None and not isinstance(setting, kind):
        raise TypeError(f"{name} is {a_kind_of(setting)}: pass a {kind.__name__}{otherwise}.")


def check_flag(name: str, flag: object) -> None:
    """Refuse a string, which would count as true: "false", and the precision in `Accelerator("bf16")`.

    Args:
        name: of the setting.
        flag: what was given.
    """
    if isinstance(flag, str):
        meant = f", or did you mean `mixed_precision={flag!r}`?" if flag in ("fp16", "bf16", "fp8") else "."
        raise TypeError(f"{name} is {flag!r}, a str: pass True or False{meant}")


def in_words(error: Exception) -> str:
    """Return an error of other code in one line, to be part of a sentence.

    Args:
        error: the error.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def a_kind_of(value: object) -> str:
    """Name the class of a value with its article, as in "an int", "a Linear" or "an SGD".

    Args:
        value: the value.
    """
    name = type(value).__name__
    spoken = name.lstrip("_")
    spelled = spoken[:2].isupper() and len(spoken) > 1  # letter by letter: "es gee dee"
    return f"{'an' if spoken[:1] in ('AEFHILMNORSX' if spelled else 'AEIOaeio') else 'a'} {name}"
