"""Which of several failures was the first, and what is said of it."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from accelerate.diagnosis import limits
from accelerate.launch.elastic import _note_ends, _report, _when


def process(exitcode: int, noticed: int = 100, time: float | None = None, **known: Any) -> Any:
    extra = {} if time is None else {"extraInfo": {"time": time, **known}}
    return SimpleNamespace(exitcode=exitcode, timestamp=noticed, error_file_data={"message": extra})


def reported(failures: dict[int, Any], ended: dict[int, int]) -> int:
    return _report(SimpleNamespace(failures=failures), False, 0, False, ended)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (process(1, time=100.2), process(1, time=100.3)),
        (process(3, time=100.9), process(-15, noticed=100)),  # ended because of the first
        (process(-9, noticed=101), process(1, time=100.5)),  # failed because the first was gone
        (process(-11), process(-15)),
        (process(1, time=100.9), process(2, noticed=100)),  # noticed at some time of that second
        (process(1, time=100.5), process(-6, noticed=100)),  # a watchdog gave up
    ],
)
def test_order(first: Any, other: Any) -> None:
    assert min([other, first], key=_when) is first


def test_what_the_launcher_itself_has_killed_is_not_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is stopped does not listen to SIGTERM, which the others are ended with."""
    failures = {0: process(limits.ABORTED), 1: process(-9, noticed=99), 2: process(limits.ABORTED)}
    assert reported(failures, {0: limits.ABORTED, 2: limits.ABORTED}) == limits.ABORTED
    last = "The run was ended because its ranks waited for each other, as shown above."
    assert capsys.readouterr().err.splitlines()[-1] == last
    # Killed by somebody else, before.
    assert reported({0: process(1, time=99.0), 1: process(-9)}, {0: 1, 1: -9}) == 128 + 9
    assert "Rank 1 on" in capsys.readouterr().err
    # Of those that failed after the first, it is none.
    assert reported({0: process(3), 1: process(-9)}, {0: 3}) == 3
    assert "was the first to fail, with exit code 3." in capsys.readouterr().err


LOST = "RuntimeError: Connection closed by peer\nRank 0 on vm has lost contact with vm (rank 1)"
NEEDED = "RuntimeError: Connection closed by peer\nRank 0 on vm needed rank 1, which had ended already with code 0"


@pytest.mark.parametrize(
    ("error", "about_others", "ended", "told"),
    [
        (LOST, True, {0: 1, 1: 0}, "Rank 1 on HOST had ended before, with code 0: look for a loop that is shorter"),
        (LOST, True, {0: 1, 1: 0, 3: 0}, "Ranks 1, 3 on HOST had ended before, with code 0: look"),
        (LOST, True, {0: 1}, None),  # the other one is on another machine, or was ended by the launcher
        (NEEDED, True, {0: 1, 1: 0}, None),  # it says so itself
        ("ValueError: a broken sample", False, {0: 1, 1: 0}, None),
    ],
)
def test_a_rank_that_had_ended_is_named_after_an_error_about_the_connection(
    error: str,
    about_others: bool,
    ended: dict[int, int],
    told: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "HOST")
    failed = process(1, time=100.0, py_callstack=error, about_others=about_others, said=True, on_screen=True)
    assert reported({0: failed}, ended) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(told) if told else last == error.splitlines()[-1]


def test_who_has_ended_is_noted_before_the_others_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        """Of torch elastic, with three ranks of a second machine."""

        def __init__(self, attempt: int, *codes: int | None) -> None:
            self.codes = list(codes)
            self.envs = {
                rank: {"RANK": str(3 + rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)} for rank in range(len(codes))
            }
            self.subprocess_handlers = {
                rank: SimpleNamespace(proc=SimpleNamespace(poll=partial(self.codes.__getitem__, rank)))
                for rank in range(len(codes))
            }

        def close(self) -> None:
            self.codes = [-15 if code is None else code for code in self.codes]

    monkeypatch.setattr(api, "SubprocessContext", Context)
    ended = _note_ends(tmp_path)
    for attempt, codes, expected in ((0, (0, None, -9), {3: 0, 5: -9}), (1, (None, 1, None), {4: 1})):
        context = Context(attempt, *codes)
        context.close()
        context.close()
        assert ended == expected
    assert [(note.name, note.read_text()) for note in tmp_path.iterdir()] == [
        ("killed-0", "rank 5 was killed by SIGKILL")
    ]
