"""What a tracker is: the base class for ours and for users' own, and what all of them share."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from accelerate.available import has_package
from accelerate.state import PartialState

logger: logging.Logger = logging.getLogger("accelerate.tracking")


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the methods of a tracker: with `main_process_only`, other processes skip them."""

    @functools.wraps(function)
    def on_chosen_processes(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return on_chosen_processes


class GeneralTracker:
    """The base class of trackers. Yours needs

    - `name` (a string) and `requires_logging_directory` (whether it is given the logging folder), on the class;
    - a property `tracker`: the object of the library underneath;
    - `log`, and where they make sense `start`, `store_init_configuration`, `finish`, `log_images` and `log_table`.

    main_process_only: with False, an `Accelerator` uses the tracker on every process.
    in_background: `log` and the others run on a thread of the tracker's own, so that a slow one does not hold up
    training; with False they are called on the thread that trains.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    in_background: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:  # stands in for a tracker that lives on another process
            return
        check_attributes(self)

    @classmethod
    def is_installed(cls) -> bool:
        """Whether what the tracker needs is there."""
        return True

    @classmethod
    def runs_on_every_process(cls) -> bool:
        """Whether an `Accelerator` makes this tracker on every process, not on the main one alone."""
        return not cls.main_process_only

    def start(self) -> None:
        """Open the run. Called once, before anything is stored or logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write values, at a step."""

    def finish(self) -> None:
        """Close the run. Nothing is logged after it."""

    def _after_step(self) -> Callable[[], None] | None:
        """What to call after each optimizer step of this process; None for nothing."""
        return None

    def _note(self, kind: str, text: str) -> None:
        """Something happened to the run: "saved" or "loaded" a checkpoint, whose folder is the text."""

    def _release(self) -> None:
        """Take back what the library did to the thread that trains: called on it, before `finish` runs elsewhere."""


def check_attributes(tracker: GeneralTracker) -> None:
    """Say what a tracker lacks of what each one must have."""
    needed = ("name", "requires_logging_directory", "tracker")
    # Asked of the class: the value of `tracker` is often made only in `start`.
    missing = [f"`{name}`" for name in needed if not hasattr(type(tracker), name) and name not in vars(tracker)]
    if missing:
        raise NotImplementedError(
            f"The tracker {type(tracker).__name__} lacks {', '.join(missing)}: define each of them on the class "
            "(`tracker` as a property)."
        )


class LibraryTracker(GeneralTracker):
    """A tracker of ours: one library, imported when the run starts."""

    package: str  # what to import
    install: str  # what to pip install

    @classmethod
    def is_installed(cls) -> bool:
        return has_package(cls.package)

    def library(self, module: str | None = None) -> Any:
        """The library, or one of its modules."""
        try:
            return importlib.import_module(module or self.package)
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise  # it is there, and lacks something itself
            raise ModuleNotFoundError(missing_sentence(type(self))) from None


def missing_sentence(kind: type[LibraryTracker]) -> str:
    """What to say when a tracker's library is not installed."""
    return f"The tracker {kind.name!r} needs the package {kind.package}: `pip install {kind.install}`."


def as_number(value: Any) -> int | float | None:
    """The value as a Python number, if it is one number: also that of a tensor or an array with one element."""
    if isinstance(value, (int, float)):
        return value
    item = getattr(value, "item", None)
    if item is None or getattr(value, "size", None) is None:
        return None
    count = value.numel() if hasattr(value, "numel") else value.size
    if count != 1 or getattr(value, "is_meta", False):  # a meta tensor has a shape, and no number
        return None
    number = item()
    return number if isinstance(number, (int, float)) else None


def one_by_one(values: dict[str, Any], log: Callable[[str, Any], Any]) -> None:
    """Log each value by itself, and say afterwards which of them failed: the others are kept."""
    failed = []
    for name, value in values.items():
        try:
            log(name, value)
        except Exception as error:
            failed.append(f"{name!r} ({type(error).__name__}: {error})")
    if failed:
        raise ValueError(f"left out: {', '.join(failed)}")


def only_numbers(values: dict[str, Any], log: Callable[[str, Any], Any], *, and_text: bool = False) -> None:
    """Log every number, and warn once of what is none: for libraries that keep nothing else (but text, perhaps)."""
    kept = {name: value if and_text and isinstance(value, str) else as_number(value) for name, value in values.items()}
    for name, value in kept.items():
        if value is None:
            _warn_of(name, type(values[name]).__name__, "numbers and text" if and_text else "numbers")
    one_by_one({name: value for name, value in kept.items() if value is not None}, log)


@functools.lru_cache(maxsize=1000)
def _warn_of(name: str, kind: str, kinds: str) -> None:
    logger.warning(f"{name!r} is left out of what is logged: only {kinds} are kept, and this is a {kind}.")


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values with one-element tensors and arrays as Python numbers, which every library takes."""
    return {name: value if (number := as_number(value)) is None else number for name, value in values.items()}
