"""Which trackers are used of those that were asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accelerate.utils import LoggerType, ProjectConfiguration
from tests.harness import run_world
from tests.unit.tracking.toys import ListTracker

KINDS = {
    name: type(f"Fake{name}", (ListTracker,), {"name": name, "requires_logging_directory": name == "tensorboard"})
    for name in ("tensorboard", "wandb")
}


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two trackers that are there, and one whose library is not."""
    PartialState(cpu=True)
    table = dict(LOGGER_TYPE_TO_CLASS)
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(KINDS)
    missing = type("Missing", (table["mlflow"],), {"package": "surely_not_there"})
    LOGGER_TYPE_TO_CLASS["mlflow"] = missing
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(table)


def test_names_members_and_instances() -> None:
    own = ListTracker()
    assert filter_trackers(None) == filter_trackers([]) == []
    assert filter_trackers("wandb") == [LoggerType.WANDB]
    asked = ["wandb", own, LoggerType.TENSORBOARD, "wandb"]
    assert filter_trackers(asked, "logs") == [LoggerType.WANDB, own, LoggerType.TENSORBOARD]


def test_all() -> None:
    own = ListTracker()
    everything = [LoggerType.TENSORBOARD, LoggerType.WANDB]
    assert get_available_trackers() == everything
    assert filter_trackers("all", "logs") == everything
    assert filter_trackers([LoggerType.ALL, "wandb", own], "logs") == [own, *everything]
    with pytest.warns(UserWarning, match="Left out of log_with='all': tensorboard, because there is no folder"):
        assert filter_trackers("all") == [LoggerType.WANDB]


def test_errors() -> None:
    with pytest.raises(ValueError, match="No tracker is called 'bogus'; choose from all, tensorboard, wandb, mlflow"):
        filter_trackers("bogus")
    with pytest.raises(ValueError, match=r"No tracker is called 'wandbb' \(did you mean `wandb`\?\); choose"):
        filter_trackers("wandbb")
    with pytest.raises(ValueError, match="'tensorboard' writes to a folder, but there is none: pass `project_dir`"):
        filter_trackers("tensorboard")


def test_a_missing_library_is_said_and_left_out() -> None:
    sentence = (
        r"^The tracker 'mlflow' needs the package surely_not_there: `pip install mlflow`\. Nothing is sent to it\.$"
    )
    with pytest.warns(UserWarning, match=sentence) as caught:
        accelerator = Accelerator(cpu=True, log_with=["mlflow", "wandb"])
    assert caught[0].filename == __file__
    assert accelerator.log_with == [LoggerType.WANDB]


def missing_on_rank() -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LOGGER_TYPE_TO_CLASS["mlflow"].package = "surely_not_there"
        accelerator = Accelerator(cpu=True, log_with="mlflow")
        accelerator.init_trackers("project")
        assert accelerator.log_with == []
    assert not any("starts no tracker" in str(warning.message) for warning in caught)  # one was named
    return sum("surely_not_there" in str(warning.message) for warning in caught)


def test_a_missing_library_is_said_once() -> None:
    assert run_world(missing_on_rank, 2) == [1, 0]


def test_logging_folder() -> None:
    assert Accelerator(cpu=True, log_with="tensorboard", project_dir="p").logging_dir == "p"
    config = ProjectConfiguration(project_dir="p", logging_dir="l")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    assert accelerator.logging_dir == "l"


def test_register() -> None:
    class Mine(ListTracker):
        name = "mine"

    register_tracker_class(Mine)
    register_tracker_class(Mine)
    assert filter_trackers("mine") == ["mine"]
    assert get_available_trackers()[-1] == "mine"

    class Other(ListTracker):
        name = "mine"

    with pytest.warns(UserWarning, match="Other now replaces Mine as the tracker 'mine'"):
        register_tracker_class(Other)
    assert LOGGER_TYPE_TO_CLASS["mine"] is Other


@pytest.mark.parametrize("wrong", [int, "text", ListTracker])
def test_only_trackers_are_registered(wrong: Any) -> None:
    if wrong is ListTracker:
        wrong = ListTracker()
    with pytest.raises(ValueError, match="is not a tracker class"):
        register_tracker_class(wrong)


def test_a_registered_class_needs_a_name() -> None:
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(ValueError, match="Nameless has no name"):
        register_tracker_class(Nameless)
