"""`accelerate runs` in the terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from accelerate.commands.runs import runs_command_parser
from accelerate.commands.utils import run_command
from accelerate.runs.terminal import duration, sparkline
from tests.unit.runs.toys import HOSTILE, write


def runs(*words: str) -> None:
    run_command(runs_command_parser(), words)


def test_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [{"lr": 0.1, "train/loss": float(value), "acc": value / 10} for value in (9, 5, 1, 2)]
    write(tmp_path, "first", logs)
    write(tmp_path, HOSTILE, [{HOSTILE: 1.0}], state="died", reason="ValueError: bad")
    runs(str(tmp_path))
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if "first" in line)
    assert first.split()[:3] == ["1", "first", "ended"]
    assert "  last step  metric" in text
    assert first.split()[-6:] == ["3", "train/loss", "█▅▁▂", "1", "↓", "2"]
    assert "run 2 died: ValueError: bad" in text
    assert "\x1b" not in text and "[red]" in text  # what is in a name neither clears the screen nor paints it
    runs(str(tmp_path), "--metric", "acc")
    text = capsys.readouterr().out
    assert next(line for line in text.splitlines() if "first" in line).split()[-5:] == [
        "acc",
        "█▅▁▂",
        "0.9",
        "↑",
        "0.2",
    ]


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", [{"loss": 2.0}, {"loss": 1.0}], {"lr": 0.1, "seed": 1})
    write(tmp_path, "b", [{"loss": 3.0}], {"lr": 0.2, "seed": 1})
    write(tmp_path, "c")
    runs(str(tmp_path), "--run", "1", "2")
    text = " ".join(capsys.readouterr().out.split())
    assert "loss ↓ █▁ 1, best 1 at 1 ▁ 3, best 3 at 0" in text
    assert "lr 0.1 0.2" in text and "the same in all runs: seed" in text
    runs(str(tmp_path), "--run", "1")
    assert "seed 1" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match=r"accelerate runs: There is no run 7: the runs are 1, 2, 3\."):
        runs(str(tmp_path), "--run", "7")
    with pytest.raises(
        SystemExit, match=r"accelerate runs: No run has a metric 'los' \(did you mean `loss`\?\): there are 'loss'\."
    ):
        runs(str(tmp_path), "--metric", "los")
    with pytest.raises(SystemExit, match=r"accelerate runs: --port is the port of the page: pass --serve as well\."):
        runs(str(tmp_path), "--port", "8000")
    with pytest.raises(SystemExit):
        runs(str(tmp_path), "--run", "x")
    assert capsys.readouterr().err.startswith("accelerate runs: --run: should be a whole number, not 'x';")
    with pytest.raises(SystemExit, match="accelerate runs: There are no runs in"):
        runs(str(_empty(tmp_path)))
    runs(str(tmp_path), "--json", "--run", "2")
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["b"]


def _empty(folder: Path) -> Path:
    place = folder / "empty"
    place.mkdir()
    return place


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", [{"loss": 2.0}])
    place = tmp_path / "run.html"
    runs(str(tmp_path), "--export", str(place))
    assert f"{place} holds the page with all its data" in capsys.readouterr().out
    assert place.read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit, match=r"--export cannot write .*run.html \(No such file or directory\): name a"):
        runs(str(tmp_path), "--export", str(tmp_path / "no" / "run.html"))


def test_serve_prints_its_address_and_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "a", [{"loss": 2.0}])
    code = (
        "import signal, sys; from accelerate.commands.accelerate_cli import main; sys.argv[0] = 'accelerate'\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # these tests may run in the background of a shell
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, flush=True)"
    )
    command = [sys.executable, "-c", code, "runs", str(tmp_path), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ}) as process:
        try:
            assert process.stdout is not None
            url = next(line.strip() for line in process.stdout if "http://" in line)
            with urllib.request.urlopen(f"{url}overview.json", timeout=60) as answer:
                assert [run["name"] for run in json.load(answer)["runs"]] == ["a"]
            query = "curves.json?kind=metric&name=loss&axis=step&runs=1"
            with urllib.request.urlopen(f"{url}{query}", timeout=60) as answer:
                assert json.load(answer)[0]["y"] == [2]
            with pytest.raises(
                SystemExit, match=r"accelerate runs: Port \d+ cannot be used .*: give another, or none for any"
            ):
                runs(str(tmp_path), "--serve", "--port", url.split(":")[2].split("/")[0])
            process.send_signal(signal.SIGINT)
            assert "False" in process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == 0


def test_lines_and_durations() -> None:
    assert sparkline([0.0, 7.0, None, 3.5]) == "▁█ ▅"
    assert sparkline([1.0, 1.0]) == "▁▁" and sparkline([None]) == sparkline([]) == ""
    assert [duration(seconds) for seconds in (5, 65, 3720, 90000)] == ["5 s", "1 m 5 s", "1 h 2 m", "1 d 1 h"]
