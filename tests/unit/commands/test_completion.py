"""Completion, in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.commands.terminal import Terminal


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def script(shell: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "accelerate", "completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    place = folder / f"completion.{shell}"
    place.write_text(done.stdout)
    return place


def offered(shell: str, place: Path, line: str) -> set[str]:
    """What a shell offers for the last word of a line."""
    return {"bash": by_bash, "zsh": by_zsh, "fish": by_fish}[shell](place, line)


def by_bash(place: Path, line: str) -> set[str]:
    code = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _accelerate; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", code, str(place), *line.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


def by_fish(place: Path, line: str) -> set[str]:
    code = f"source {place}; complete -C {line!r}"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    return {row.split("\t")[0] for row in done.stdout.splitlines()}


def by_zsh(place: Path, line: str) -> set[str]:
    terminal = Terminal(["zsh", "-f", "-i"], {**os.environ, "ZDOTDIR": str(place.parent), "PS1": "ready> "})
    try:
        terminal.wait_for("ready> ")
        # A long list is shown without asking.
        terminal.send(f"autoload -U compinit && compinit -u -D && source {place} && LISTMAX=1000 && echo lo''aded\r")
        terminal.wait_for("loaded")
        terminal.wait_for("ready> ")
        terminal.send(line + "\x04")  # which lists what would be offered
        terminal.send("\x15echo 'e''nd'\r")  # in place of the line
        return set(terminal.wait_for("end").replace("accelerate", " ").split())  # drawn again right behind the list
    finally:
        terminal.close()


def test_commands_flags_and_values_are_offered(shell: str, tmp_path: Path) -> None:
    place = script(shell, tmp_path)
    assert {"config", "launch", "env", "estimate-memory"} <= offered(shell, place, "accelerate ")
    assert {"--num_processes", "--num_machines"} <= offered(shell, place, "accelerate launch --cpu --num_")
    assert {"no", "fp16", "bf16"} <= offered(shell, place, "accelerate launch --mixed_precision ")
    assert {"default", "update"} <= offered(shell, place, "accelerate config ")
    assert "--json" in offered(shell, place, "accelerate env --")


def test_what_follows_the_script_is_its_own(tmp_path: Path) -> None:
    place = script("bash", tmp_path)
    assert offered("bash", place, "accelerate launch --num_processes 2 train.py --") == set()
    assert offered("bash", place, "accelerate launch --num_processes 2 --cp") == {"--cpu"}
    assert offered("bash", place, "accelerate launch --num_processes ") == set(), "a number, or the name of a file"


def test_an_unknown_shell() -> None:
    command = [sys.executable, "-m", "accelerate", "completion", "tcsh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "choose one of bash, zsh, fish" in done.stderr
