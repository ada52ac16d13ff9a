"""Trackers through the Accelerator."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, WandBTracker, register_tracker_class
from tests.harness import run_world
from tests.unit.tracking.toys import ListTracker


class Named(ListTracker):
    name = "named"


class InFolder(ListTracker):
    name = "in_folder"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir


@pytest.fixture(autouse=True)
def registered() -> Any:
    table = dict(LOGGER_TYPE_TO_CLASS)
    register_tracker_class(Named)
    register_tracker_class(Portable)
    register_tracker_class(InFolder)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(table)


def test_a_run() -> None:
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    assert accelerator.trackers == []
    with pytest.warns(UserWarning, match="`log` was called before the trackers"):
        accelerator.log({"too": "early"})
    accelerator.init_trackers("project", config={"lr": 1})
    assert accelerator.trackers == [tracker]
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"list": {"more": 1}, "another": {"x": 2}})
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.seen == [("start",), ("config", {"lr": 1}), ("log", {"loss": 0.5}, 3, {"more": 1}), ("finish",)]


def test_by_name() -> None:
    accelerator = Accelerator(cpu=True, log_with=["named", "in_folder"], project_dir="folder")
    accelerator.init_trackers("project", init_kwargs={"named": {"a": 1}})
    named, in_folder = accelerator.trackers
    assert isinstance(named, Named)
    assert isinstance(in_folder, InFolder)
    assert (named.run_name, named.kwargs) == ("project", {"a": 1})
    assert (in_folder.run_name, in_folder.logging_dir, in_folder.kwargs) == ("project", "folder", {})
    assert named.seen == [("start",)]  # no configuration was given
    accelerator.end_training()


def test_get_tracker() -> None:
    accelerator = Accelerator(cpu=True, log_with="named")
    with pytest.warns(UserWarning, match=r"`get_tracker` was called before .* returns does nothing: call") as caught:
        assert type(accelerator.get_tracker("named")) is GeneralTracker  # not started yet
        accelerator.get_tracker("named")
    assert len(caught) == 1 and caught[0].filename == __file__
    accelerator.init_trackers("project")
    tracker = accelerator.get_tracker("named")
    assert isinstance(tracker, Named)
    assert accelerator.get_tracker("named", unwrap=True) is tracker.seen
    with pytest.raises(ValueError, match=r"no tracker 'wandb': it has 'named'\."):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_values_without_names() -> None:
    class Strict(ListTracker):
        in_background = False

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.seen.append(("log", dict(values.items()), step))

    strict = Strict()
    accelerator = Accelerator(cpu=True, log_with=strict)
    accelerator.init_trackers("project")
    with pytest.warns(UserWarning, match=r'it was given an int: pass a dict, as in `accelerator.log\(\{"loss": loss'):
        accelerator.log(3)  # type: ignore[arg-type]
    accelerator.log({"a": 1})
    assert strict.seen[-1][:2] == ("log", {"a": 1})
    accelerator.end_training()


def test_direct_calls_come_after_what_was_logged() -> None:
    gate = threading.Event()

    class Waits(ListTracker):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            gate.wait(10)
            super().log(values, step, **kwargs)

    accelerator = Accelerator(cpu=True, log_with=Waits())
    accelerator.init_trackers("project")
    for step in range(5):
        accelerator.log({}, step=step)
    threading.Timer(0.05, gate.set).start()
    accelerator.get_tracker("list", unwrap=True).append("direct")
    for step in range(5, 9):
        accelerator.log({}, step=step)
    for tracker in accelerator.trackers:
        tracker.log({}, step=9)
    accelerator.end_training()
    seen = tracker.tracker  # type: ignore[attr-defined]
    assert [entry if entry == "direct" else entry[2] for entry in seen[1:-1]] == [
        0,
        1,
        2,
        3,
        4,
        "direct",
        5,
        6,
        7,
        8,
        9,
    ]


def test_two_runs_one_after_the_other() -> None:
    own = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=["named", own])
    accelerator.init_trackers("one")
    accelerator.init_trackers("two")  # without an end: a second one by that name, but never the same object twice
    assert [tracker.name for tracker in accelerator.trackers] == ["named", "list", "named"]
    accelerator.end_training()
    accelerator.init_trackers("three")
    assert [tracker.name for tracker in accelerator.trackers] == ["named", "list"]
    accelerator.log({"a": 1})
    accelerator.end_training()
    assert [entry[0] for entry in own.seen] == ["start", "finish", "start", "log", "finish"]


def test_the_list_is_the_scripts_own() -> None:
    added, assigned = ListTracker(), ListTracker()
    accelerator = Accelerator(cpu=True)
    accelerator.trackers.append(added)
    accelerator.log({"a": 1})
    accelerator.trackers = [assigned]
    accelerator.log({"a": 2})
    accelerator.end_training()
    assert [entry[0] for entry in assigned.seen] == ["log", "finish"]
    assert len(added.seen) == 1
    accelerator.trackers = [added]
    accelerator.end_training()


class Pictures(Named):
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append(("images", values, step, kwargs))

    def log_table(self, table_name: str, **kwargs: Any) -> None:
        self.seen.append(("table", table_name, kwargs))


def test_images_and_tables(recwarn: pytest.WarningsRecorder) -> None:
    able, unable = Pictures(), ListTracker()
    accelerator = Accelerator(cpu=True, log_with=[able, unable])
    accelerator.init_trackers("project")
    for _ in range(2):
        accelerator.log_images({"a": [1]}, step=2, log_kwargs={"named": {"format": "NHWC"}})
    accelerator.log_table("name", columns=["x"], data=[[1]], step=3)
    accelerator.end_training()
    assert able.seen[1] == ("images", {"a": [1]}, 2, {"format": "NHWC"})
    assert able.seen[3] == ("table", "name", {"columns": ["x"], "data": [[1]], "dataframe": None, "step": 3})
    assert [str(warning.message) for warning in recwarn] == [
        "The tracker 'list' has no `log_images`, so it is left out.",
        "The tracker 'list' has no `log_table`, so it is left out.",
    ]


class Broken(ListTracker):
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise OSError("no network")


def test_a_broken_tracker_harms_nobody() -> None:
    other = Named()
    accelerator = Accelerator(cpu=True, log_with=[Broken(), other])
    accelerator.init_trackers("project")
    with pytest.warns(UserWarning, match="The tracker 'list' failed in `log`.*OSError: no network") as caught:
        for step in range(5):
            accelerator.log({"a": 1}, step=step)
        accelerator.end_training()
    assert len(caught) == 1
    assert [entry[0] for entry in other.seen] == ["start", *["log"] * 5, "finish"]


def test_a_tracker_that_cannot_start_is_an_error() -> None:
    class NoKey(ListTracker):
        def start(self) -> None:
            raise PermissionError("no key")

    with pytest.raises(PermissionError):
        Accelerator(cpu=True, log_with=NoKey()).init_trackers("project")


def test_the_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Hangs(ListTracker):
        def finish(self) -> None:
            gate.wait(60)

    other = Named()
    accelerator = Accelerator(cpu=True, log_with=[Hangs(), other])
    accelerator.init_trackers("project")
    monkeypatch.setenv("ACCELERATE_TRACKER_TIMEOUT", "0.2")
    with pytest.warns(UserWarning, match=r"'list' did not end within 0\.2 seconds.*ACCELERATE_TRACKER_TIMEOUT"):
        accelerator.end_training()
    assert other.seen[-1] == ("finish",)
    gate.set()


def test_arguments_of_any_name() -> None:
    names = ("self", "what", "function", "tracker", "method", "own", "name")
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    accelerator.log({"a": 1}, log_kwargs={"list": dict.fromkeys(names[1:], 1)})
    accelerator.log({"a": 1}, step=1, log_kwargs={"list": {"step": 2}})
    accelerator.end_training()
    assert tracker.seen[1] == ("log", {"a": 1}, None, dict.fromkeys(names[1:], 1))
    assert tracker.seen[2] == ("log", {"a": 1}, 2, {})


@pytest.mark.parametrize("log_kwargs", [["list"], {"list": 3}, {"list": {"self": 1}}])
def test_wrong_arguments_warn_and_go_on(log_kwargs: Any) -> None:
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    with pytest.warns(UserWarning, match="The tracker 'list' failed in `log`") as caught:
        for _ in range(2):
            accelerator.log({"a": 1}, log_kwargs=log_kwargs)
        accelerator.end_training()
    assert len(caught) == 1
    assert [entry[0] for entry in tracker.seen] == ["start", "finish"]


def test_arguments_for_a_tracker_whose_name_is_misspelt(recwarn: pytest.WarningsRecorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=["named", ListTracker()])
    mine = {"tensorboard": {}, "of_mine": {}}  # known, and not in use; nearly nothing that is known
    accelerator.init_trackers("project", init_kwargs={"naned": {"a": 1}, "named": {}, **mine})
    for _ in range(2):
        accelerator.log({"a": 1}, log_kwargs={"lits": {"a": 1}, "list": {}, **mine})
    accelerator.end_training()
    said = [(str(warning.message), warning.filename) for warning in recwarn]
    start, log = "`init_kwargs` has arguments for 'naned'", "`log_kwargs` has arguments for 'lits'"
    end = "(did you mean `{}`?), which is no tracker: they have no effect."
    assert said == [(f"{start} {end.format('named')}", __file__), (f"{log} {end.format('list')}", __file__)]


def test_a_tensor_without_a_value() -> None:
    accelerator = Accelerator(cpu=True, log_with=ListTracker())
    accelerator.init_trackers("project")
    value = torch.ones((), device="meta")
    accelerator.log({"a": value, "b": torch.ones(())})
    [tracker] = accelerator.trackers
    logged = tracker.tracker[-1][1]  # type: ignore[attr-defined]
    assert logged["a"].is_meta  # what becomes of it is the tracker's affair
    assert logged["b"] == 1
    accelerator.end_training()


class Portable(ListTracker):
    name = "portable"


def test_it_travels_with_its_trackers() -> None:
    accelerator = Accelerator(cpu=True, log_with=["portable", Portable()])
    accelerator.init_trackers("project")
    accelerator.log({"a": 1})
    copied = pickle.loads(pickle.dumps(accelerator))
    assert [tracker.seen[-1][1] for tracker in copied.trackers] == [{"a": 1}] * 2
    assert copied.log_with[1] is copied.trackers[1]
    copied.log({"a": 2})
    copied.end_training()
    for tracker in copied.trackers:
        assert [entry[0] for entry in tracker.seen] == ["start", "log", "log", "finish"]
    for tracker in accelerator.trackers:
        assert len(tracker.tracker) == 2  # type: ignore[attr-defined]
    accelerator.end_training()
    assert pickle.loads(pickle.dumps(accelerator)).trackers == []


class Forgetful(GeneralTracker):
    def __init__(self, *args: Any) -> None:
        self.seen = args


class Anonymous(Forgetful):
    requires_logging_directory = False
    tracker = None


def test_a_tracker_that_lacks_something() -> None:
    with pytest.raises(NotImplementedError, match="Anonymous lacks `name`:"):
        Accelerator(cpu=True, log_with=Anonymous())
    LOGGER_TYPE_TO_CLASS["forgetful"] = type("Late", (Forgetful,), {"name": "forgetful", "tracker": None})
    LOGGER_TYPE_TO_CLASS["forgetful"].requires_logging_directory = False
    Accelerator(cpu=True, log_with="forgetful").init_trackers("project")
    del LOGGER_TYPE_TO_CLASS["forgetful"].tracker
    with pytest.raises(NotImplementedError, match="Late lacks `tracker`:"):
        Accelerator(cpu=True, log_with="forgetful").init_trackers("project")


class Everywhere(ListTracker):
    name = "everywhere"
    main_process_only = False


class Wandb(WandBTracker):
    """As ours, without the library."""

    def start(self) -> None:
        self.run = "run"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        return

    def finish(self) -> None:
        return


def on_rank() -> tuple[list[str], list[str], list[str], str, str]:
    register_tracker_class(Everywhere)
    main, everywhere = ListTracker(), Everywhere()
    accelerator = Accelerator(cpu=True, log_with=[main, everywhere, "everywhere", Wandb("x")])
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"b": 2})
    names = [tracker.name for tracker in accelerator.trackers]
    kinds = [type(accelerator.get_tracker(name)).__name__ for name in ("list", "everywhere")]
    try:
        accelerator.get_tracker("bogus")
    except ValueError as error:
        text = str(error)
    accelerator.end_training()
    return names, [entry[0] for entry in main.seen], [entry[0] for entry in everywhere.seen], *kinds, text  # type: ignore[return-value]


def test_on_two_processes() -> None:
    whole = ["start", "config", "log", "finish"]
    text = "This Accelerator has no tracker 'bogus': it has 'list', 'everywhere', 'everywhere', 'wandb'."
    assert run_world(on_rank, 2) == [
        (["list", "everywhere", "everywhere", "wandb"], whole, whole, "ListTracker", "Everywhere", text),
        (["everywhere", "everywhere"], [], whole, "GeneralTracker", "Everywhere", text),
    ]


def an_instance_decides_for_itself() -> list[str]:
    tracker = ListTracker()
    tracker.main_process_only = False
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    accelerator.log({"a": accelerator.process_index})
    accelerator.end_training()
    return [entry[0] for entry in tracker.seen]


def test_an_instance_can_ask_for_every_process() -> None:
    first, second = run_world(an_instance_decides_for_itself, 2)
    assert first == second and "log" in first
