"""Why all processes were started again: in a line of the attempt after."""

from __future__ import annotations

from pathlib import Path

import pytest

import accelerate.state.lost  # as a script that uses the package has
from accelerate.launch import worker

assert accelerate.state.lost.is_about_others("Connection closed by peer")


def _said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of the second attempt, once."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "attempt_1" / "0" / "error.json"))
    worker.say_attempt()
    said = capsys.readouterr().err
    worker.say_attempt()
    assert capsys.readouterr().err == ""
    return said.removeprefix("accelerate: attempt 2 of 4, after ").strip()


def _fails(folder: Path, rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    worker.record(error, None)


@pytest.mark.parametrize(
    ("errors", "killed", "why"),
    [
        (["Connection closed by peer", "a broken sample"], None, "rank 1 failed with RuntimeError: a broken sample"),
        (["Connection closed by peer"], None, "a rank was lost"),
        (["Connection closed by peer", "odd"], "rank 1 was killed by SIGKILL", "rank 1 was killed by SIGKILL"),
        ([], None, "a rank was lost"),
    ],
)
def test_the_cause_is_named_and_not_what_it_did_to_others(
    errors: list[str],
    killed: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ACCELERATE_PREEMPTION_NOTE", f"1:{tmp_path / 'preempted'}")
    for rank, text in enumerate(errors):
        _fails(tmp_path, rank, RuntimeError(text), monkeypatch)
    if killed is not None:
        (tmp_path / "killed-0").write_text(killed)
    assert _said(tmp_path, monkeypatch, capsys) == why
