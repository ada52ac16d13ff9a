import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.tqdm import tqdm
from tests.harness import run_world


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    before = logging.root.level
    yield
    logging.root.setLevel(before)


def test_without_a_state() -> None:
    with pytest.raises(RuntimeError, match=r"PartialState\(\)"):
        get_logger("a").debug("x")


def test_messages_name_the_rank_and_the_line_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger("b", log_level="info")
    logger.debug("hidden")
    logger.info("hello %s", "you", main_process_only=False)
    logger.warning_once("again")
    [hello, again] = caplog.records
    assert hello.getMessage() == "[RANK 0] hello you"
    assert again.getMessage() == "[RANK 0] again"
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


class Around(logging.LoggerAdapter):
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})


def test_an_adapter_around_a_logger_reports_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger("around", log_level="info")

    def wrapped() -> None:
        Around(logger, {}).info("hello")

    def plain() -> None:
        logger.info("one", stacklevel=1)
        logger.info("two", stacklevel=2)

    def above() -> None:
        logger.info("three", stacklevel=3)

    def caller() -> None:
        above()

    wrapped()
    plain()
    caller()
    assert [record.funcName for record in caplog.records] == ["wrapped", "plain", "plain", "caller"]
    assert {record.pathname for record in caplog.records} == {__file__}


def test_once(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger("c")
    for text in ("one", "one", "two"):
        logger.warning_once(text)
    assert caplog.messages == ["[RANK 0] one", "[RANK 0] two"]


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("d").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "ERROR")
    assert get_logger("e").logger.level == logging.ERROR
    assert get_logger("f", log_level="debug").logger.level == logging.DEBUG
    with pytest.raises(ValueError, match="log_level is 'bogus': choose one of DEBUG, INFO"):
        get_logger("g", log_level="bogus")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "FOO")
    with pytest.raises(ValueError, match="ACCELERATE_LOG_LEVEL is 'FOO': choose one of DEBUG, INFO"):
        get_logger("h")


def speak(path: str) -> None:
    PartialState()
    handler = logging.FileHandler(path)
    logger = get_logger("world", log_level="INFO")
    logger.logger.addHandler(handler)
    logger.info("main")
    logger.info("all", main_process_only=False, in_order=True)


def test_ranks_speak_in_order(tmp_path: Path) -> None:
    run_world(speak, 2, str(tmp_path / "log"))
    assert (tmp_path / "log").read_text().splitlines() == ["[RANK 0] main", "[RANK 0] all", "[RANK 1] all"]


def bars() -> tuple[bool, bool]:
    return tqdm(range(2)).disable, tqdm(range(2), main_process_only=False).disable


def test_one_progress_bar() -> None:
    assert run_world(bars, 2) == [(False, False), (True, False)]


def test_progress_bar_arguments() -> None:
    PartialState(cpu=True)
    assert tqdm(range(2), disable=True).disable is True
    with pytest.raises(ValueError, match="main_process_only=True"):
        tqdm(True, range(2))


@pytest.mark.parametrize(("value", "hook"), [(None, "sys"), ("0", "sys"), ("1", "rich.traceback")])
def test_rich_tracebacks_only_where_asked_for(value: str | None, hook: str) -> None:
    env = {name: text for name, text in os.environ.items() if name != "ACCELERATE_ENABLE_RICH"}
    if value is not None:
        env["ACCELERATE_ENABLE_RICH"] = value
    code = "import sys, accelerate; print(sys.excepthook.__module__)"
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == hook
