"""What a tracker has to have, and what happens when its library is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.state import PartialState
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    ClearMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    WandBTracker,
    on_main_process,
    register_tracker_class,
)
from accelerate.tracking.base import LibraryTracker, as_number, one_by_one, only_numbers, plain
from tests.harness import run_world
from tests.unit.tracking.toys import ListTracker


def test_required_attributes() -> None:
    class Nothing(GeneralTracker):
        pass

    class Nearly(GeneralTracker):
        name = "nearly"
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match="Nothing lacks `name`, `requires_logging_directory`, `tracker`:"):
        Nothing()
    with pytest.raises(NotImplementedError, match="Nearly lacks `tracker`:"):
        Nearly()
    assert ListTracker().tracker == []


def test_a_tracker_may_be_made_in_start() -> None:
    class Late(ListTracker):
        @property
        def tracker(self) -> Any:
            return self.run

        def start(self) -> None:
            self.run = "run"

    tracker = Late()
    tracker.start()
    assert tracker.tracker == "run"


def test_attributes_of_an_instance_count() -> None:
    class Own(GeneralTracker):
        def __init__(self) -> None:
            self.name = "own"
            self.requires_logging_directory = False
            self.tracker = self
            super().__init__()

    assert Own().name == "own"


def test_blank_does_nothing() -> None:
    blank = GeneralTracker(_blank=True)
    done = [blank.start(), blank.store_init_configuration({}), blank.log({"a": 1}, step=1, more=2), blank.finish()]
    assert done == [None] * 4 and vars(blank) == {}
    with pytest.raises(NotImplementedError):
        GeneralTracker()  # without a name, unlike one that stands in for another


class Decorated(ListTracker):
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step)


class Everywhere(Decorated):
    main_process_only = False


def decorated() -> list[int]:
    PartialState(cpu=True)
    trackers = [Decorated(), Everywhere()]
    for tracker in trackers:
        tracker.log({"a": 1})
    return [len(tracker.seen) for tracker in trackers]


def test_on_main_process() -> None:
    assert run_world(decorated, 2) == [[1, 1], [0, 1]]


@pytest.mark.parametrize("name", [name for name, kind in LOGGER_TYPE_TO_CLASS.items() if hasattr(kind, "package")])
def test_missing_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    kind = LOGGER_TYPE_TO_CLASS[name]
    for package in (kind.package, "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    tracker = kind("run", *(["."] if kind.requires_logging_directory else []))
    with pytest.raises(ImportError, match=rf"^The tracker '{name}' needs the package \w+: `pip install .+`\.$"):
        tracker.start()


def test_a_library_that_lacks_something_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("import surely_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Broken(LibraryTracker):
        name = "broken"
        requires_logging_directory = False
        package = install = "broken_library"
        tracker = None

    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        Broken().library()


def test_numbers() -> None:
    numbers = [1, 2.5, True, torch.tensor(3.5), torch.tensor([4]), np.float32(0.5), np.array([[6]])]
    assert [as_number(value) for value in numbers] == [1, 2.5, True, 3.5, 4, 0.5, 6]
    assert [as_number(value) for value in ("1", None, torch.zeros(2), np.zeros(0), [1], {})] == [None] * 6
    assert as_number(torch.zeros((), device="meta")) is None
    assert plain({"a": torch.tensor(2.0), "b": "text"}) == {"a": 2.0, "b": "text"}


def test_only_numbers_says_once_what_was_none(caplog: pytest.LogCaptureFixture) -> None:
    kept: dict[str, Any] = {}
    for _ in range(2):
        only_numbers({"a": 1, "words": "x", "b": torch.tensor(2.0)}, kept.__setitem__)
    assert kept == {"a": 1, "b": 2.0}
    assert [record.name for record in caplog.records] == ["accelerate.tracking"]
    assert "'words' is not logged" in caplog.text


def test_dvclive_keeps_text() -> None:
    class Live:
        step = 0

        def __init__(self) -> None:
            self.logged: dict[str, Any] = {}

        def log_metric(self, name: str, value: Any) -> None:
            self.logged[name] = value

        def next_step(self) -> None:
            self.step += 1

    PartialState(cpu=True)
    live = Live()
    DVCLiveTracker(live=live).log({"note": "words", "loss": torch.tensor(2.0)}, step=3)
    assert (live.logged, live.step) == ({"note": "words", "loss": 2.0}, 4)


@pytest.mark.parametrize("lacks", ["name", "requires_logging_directory"])
def test_a_class_that_lacks_something_is_not_registered(lacks: str) -> None:
    attributes = {"name": "own", "requires_logging_directory": False}
    del attributes[lacks]
    with pytest.raises(ValueError, match="The tracker class Own"):
        register_tracker_class(type("Own", (GeneralTracker,), attributes))
    assert "own" not in LOGGER_TYPE_TO_CLASS


def test_one_that_fails_does_not_lose_the_others() -> None:
    kept: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        kept[name] = 1 / value

    with pytest.raises(ValueError, match=r"^left out: 'b' \(ZeroDivisionError: .+\), 'c' \(TypeError: .+\)$"):
        one_by_one({"a": 1, "b": 0, "c": "x", "d": 2}, keep)
    assert kept == {"a": 1, "d": 0.5}


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    seen: list[Any] = []
    tracker = WandBTracker("runs")
    monkeypatch.setattr(tracker, "library", lambda: SimpleNamespace(Table=dict))
    tracker.run = SimpleNamespace(log=lambda values, step, **kwargs: seen.append((values, step, kwargs)))
    tracker.log_table("t", ["x"], [[1]], step=2, more=3)
    tracker.log_table("empty", ["x"])
    assert seen == [
        ({"t": {"columns": ["x"], "data": [[1]], "dataframe": None}}, 2, {"more": 3}),
        ({"empty": {"columns": ["x"], "data": None, "dataframe": None}}, None, {}),
    ]


def test_clearml_has_no_empty_tables() -> None:
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="the table 't' has neither `data` nor `dataframe`"):
        ClearMLTracker().log_table("t", ["x"])
