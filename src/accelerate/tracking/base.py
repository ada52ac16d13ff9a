"""What a tracker is: the base class for ours and for users' own, and what all of them share."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from accelerate.available import has_package
from accelerate.errors import a_kind_of
from accelerate.state import PartialState

logger: logging.Logger = logging.getLogger("accelerate.tracking")


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a tracker so that, with `main_process_only`, other ranks skip it.

    Args:
        function: the method.
    """

    @functools.wraps(function)
    def on_chosen_processes(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return on_chosen_processes


class GeneralTracker:
    """Base class of trackers.

    A subclass needs

    - `name` (a string) and `requires_logging_directory` (whether it takes the logging folder), on the class;
    - a property `tracker`: the object of the library;
    - `log`, and where they make sense `start`, `store_init_configuration`, `finish`, `log_images` and `log_table`.

    Args:
        _blank: make a tracker that does nothing, which ranks without trackers get.

    Attributes:
        main_process_only: if False, an `Accelerator` uses the tracker on every rank.
        in_background: call `log` and the other methods on a separate thread, so that a slow tracker does not hold up
            training. If False, they are called on the thread that trains.
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
        """Tell whether what the tracker needs is installed."""
        return True

    @classmethod
    def runs_on_every_process(cls) -> bool:
        """Tell whether an `Accelerator` creates this tracker on every rank, not only on rank 0."""
        return not cls.main_process_only

    def start(self) -> None:
        """Open the run. It is called once, before anything is stored or logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run.

        Args:
            values: the settings.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: the values, by name.
            step: the training step.
            kwargs: arguments for the library.
        """

    def finish(self) -> None:
        """Close the run. Nothing is logged after it."""

    def _after_step(self) -> Callable[[], None] | None:
        """What to call after each optimizer step of this process; None for nothing."""
        return None

    def _note(self, kind: str, text: str) -> None:
        """Something happened to the run: "saved" or "loaded" a checkpoint, whose folder is the text, or "preempted"."""

    def _release(self) -> None:
        """Take back what the library did to the thread that trains: called on it, before `finish` runs elsewhere."""


def check_attributes(tracker: GeneralTracker) -> None:
    """Raise an error if a tracker lacks something that each one must have."""
    needed = ("name", "requires_logging_directory", "tracker")
    # Asked of the class: the value of `tracker` is often made only in `start`.
    missing = [f"`{name}`" for name in needed if not hasattr(type(tracker), name) and name not in vars(tracker)]
    if missing:
        raise NotImplementedError(
            f"The tracker {type(tracker).__name__} lacks {', '.join(missing)}: define each of them on the class "
            "(`tracker` as a property)."
        )


class LibraryTracker(GeneralTracker):
    """Log with one library, which is imported when the run starts."""

    package: str  # what to import
    install: str  # what to pip install

    @classmethod
    def is_installed(cls) -> bool:
        return has_package(cls.package)

    def library(self, module: str | None = None) -> Any:
        """Import the library, or one of its modules.

        Args:
            module: the module. By default the library itself.

        Raises:
            ModuleNotFoundError: it is not installed.
        """
        try:
            return importlib.import_module(module or self.package)
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise  # it is there, and lacks something itself
            raise ModuleNotFoundError(missing_sentence(type(self))) from None


def missing_sentence(kind: type[LibraryTracker]) -> str:
    """Return the sentence for a tracker whose library is not installed."""
    return f"The tracker {kind.name!r} needs the package {kind.package}: `pip install {kind.install}`."


def settings_of(config: Any) -> Any:
    """Return the settings of a run by name, from a mapping, a dataclass, or what argparse returns.

    Raises:
        TypeError: it is none of these.
    """
    from argparse import Namespace
    from types import SimpleNamespace

    if config is None or isinstance(config, Mapping):
        return config
    if isinstance(config, (Namespace, SimpleNamespace)):
        return vars(config)
    if is_dataclass(config) and not isinstance(config, type):
        return {each.name: getattr(config, each.name) for each in fields(config)}
    if hasattr(config, "keys") and not isinstance(config, type):  # those of ml_collections are no Mapping
        return {name: config[name] for name in config.keys()}  # noqa: SIM118  (nor do they all iterate over names)
    raise TypeError(f"config is {a_kind_of(config)}: pass the settings of the run as a dict, by name.")


def as_number(value: Any) -> int | float | None:
    """Return a number, or a tensor or array with one element, as a Python number; None for anything else."""
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
    """Log every number, and warn once about anything else, for libraries that keep only numbers (and perhaps text)."""
    kept = {name: value if and_text and isinstance(value, str) else as_number(value) for name, value in values.items()}
    for name, value in kept.items():
        if value is None:
            _warn_of(name, type(values[name]).__name__, "numbers and text" if and_text else "numbers")
    one_by_one({name: value for name, value in kept.items() if value is not None}, log)


@functools.lru_cache(maxsize=1000)
def _warn_of(name: str, kind: str, kinds: str) -> None:
    logger.warning(f"{name!r} is not logged: only {kinds} are kept, and this is a {kind}.")


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with one-element tensors and arrays as Python numbers, which every library accepts."""
    return {name: value if (number := as_number(value)) is None else number for name, value in values.items()}


def flat(values: dict[Any, Any], separator: str, before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts, with joined names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, separator, f"{before}{name}{separator}")
        else:
            yield f"{before}{name}", value
