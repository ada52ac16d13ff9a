"""Experiment trackers: one file each, and the table that knows them by name."""

from __future__ import annotations

import os
from typing import Any

from accelerate.config.enums import LoggerType
from accelerate.errors import warn
from accelerate.state import PartialState
from accelerate.text import did_you_mean
from accelerate.tracking.aim import AimTracker
from accelerate.tracking.base import GeneralTracker, check_attributes, missing_sentence, on_main_process
from accelerate.tracking.clearml import ClearMLTracker
from accelerate.tracking.comet_ml import CometMLTracker
from accelerate.tracking.dvclive import DVCLiveTracker
from accelerate.tracking.local import LocalTracker
from accelerate.tracking.mlflow import MLflowTracker
from accelerate.tracking.swanlab import SwanLabTracker
from accelerate.tracking.tensorboard import TensorBoardTracker
from accelerate.tracking.trackio import TrackioTracker
from accelerate.tracking.wandb import WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "LocalTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

LOGGER_TYPE_TO_CLASS: dict[str, Any] = {
    kind.name: kind
    for kind in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
}
# Of this package alone: not among what scripts find in the table, and "all" does not mean it.
_OWN: dict[str, Any] = {LocalTracker.name: LocalTracker}
for _kind in (GeneralTracker, *LOGGER_TYPE_TO_CLASS.values(), *_OWN.values()):
    _kind.__module__ = __name__  # where the public knows them


def known_trackers() -> dict[str, Any]:
    """Every tracker that `log_with` can name."""
    return {**LOGGER_TYPE_TO_CLASS, **{name: kind for name, kind in _OWN.items() if name not in LOGGER_TYPE_TO_CLASS}}


def get_available_trackers() -> list[Any]:
    """Return the trackers of `log_with="all"`: those whose library is installed, and those that are registered."""
    return [_as_member(name) for name, kind in LOGGER_TYPE_TO_CLASS.items() if kind.is_installed()]


def _as_member(name: str) -> Any:
    return LoggerType(name) if name in LoggerType.list() else name


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make your own tracker known by its name, so that `log_with` finds it.

    Args:
        tracker_class: a subclass of `GeneralTracker`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"{tracker_class!r} is not a tracker class: derive it from GeneralTracker.")
    name = getattr(tracker_class, "name", None)
    if not (isinstance(name, str) and name):
        raise ValueError(f"The tracker class {tracker_class.__name__} has no name: set `name` to a string.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"The tracker class {tracker_class.__name__} does not say whether it writes to a folder: set "
            "`requires_logging_directory` to True or False."
        )
    known = known_trackers().get(name)
    if known is not None and known is not tracker_class:
        warn(f"{tracker_class.__name__} now replaces {known.__name__} as the tracker {name!r}.")
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the trackers to use, out of those asked for: instances as they are, names if their library is installed.

    Args:
        log_with: names, members of `LoggerType`, tracker objects, or several of them. "all" means every tracker that is
            installed, except "local".
        logging_dir: the folder for trackers that write to one.

    Raises:
        ValueError: a name is unknown, or a tracker needs a folder and there is none.
    """
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    for item in asked:
        if isinstance(item, GeneralTracker):
            check_attributes(item)  # which its own __init__ may have forgotten to have done
    if any(not isinstance(item, GeneralTracker) and str(item) == "all" for item in asked):
        instances = [item for item in asked if isinstance(item, GeneralTracker)]
        installed = get_available_trackers()
        chosen = [name for name in installed if _has_folder(name, logging_dir)]
        if len(chosen) < len(installed):
            missed = ", ".join(str(name) for name in installed if name not in chosen)
            _warn_once_for_all(
                f"Left out of log_with='all': {missed}, because there is no folder to write to; pass `project_dir`."
            )
        named = [item for item in asked if not isinstance(item, GeneralTracker) and not _in_all(str(item))]
        return instances + chosen + filter_trackers(named, logging_dir)
    chosen = []
    for item in asked:
        if isinstance(item, GeneralTracker):
            chosen.append(item)
            continue
        name = str(item)
        if name not in known_trackers():
            raise ValueError(
                f"No tracker is called {name!r}{did_you_mean(name, known_trackers())}; choose from all, "
                f"{', '.join(known_trackers())}, pass an instance of a GeneralTracker, or "
                "register your class with `register_tracker_class`."
            )
        if not known_trackers()[name].is_installed():
            _warn_once_for_all(f"{missing_sentence(known_trackers()[name])} Nothing is sent to it.")
        elif not _has_folder(name, logging_dir):
            raise ValueError(
                f"The tracker {name!r} writes to a folder, but there is none: pass `project_dir` or a "
                "ProjectConfiguration with `logging_dir`."
            )
        elif _as_member(name) not in chosen:
            chosen.append(_as_member(name))
    return chosen


def _warn_once_for_all(message: str) -> None:
    if PartialState().is_main_process:
        warn(message)


def _in_all(name: str) -> bool:
    return name == "all" or name in LOGGER_TYPE_TO_CLASS


def _has_folder(name: Any, logging_dir: str | os.PathLike[str] | None) -> bool:
    return logging_dir is not None or not known_trackers()[str(name)].requires_logging_directory
