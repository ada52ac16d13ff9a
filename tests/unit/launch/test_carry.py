"""What workers of other machines are told through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch import carry


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")


def meaning(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines)


def test_of_what_is_said_twice_the_last_holds(tmp_path: Path) -> None:
    (tmp_path / "home" / ".deepspeed_env").write_text("A=home\nB=home\n\n")
    (tmp_path / "work" / ".deepspeed_env").write_text("B=work\nC=work\n")
    shell = {"A": "shell", "B": "shell", "C": "shell", "D": "shell"}
    assert meaning(carry.lines(shell, {"C": "ours"})) == {"A": "home", "B": "work", "C": "ours", "D": "shell"}


def test_a_file_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "work" / ".deepspeed_env").write_text("A=usual\n")
    (tmp_path / "mine").write_text("A=mine\n")
    told = meaning(carry.lines({"DS_ENV_FILE": str(tmp_path / "mine")}, {}))
    assert told["A"] == "mine"


def test_what_belongs_to_this_machine_stays_here() -> None:
    shell = {"HF_HOME": "/x", "PWD": "/y", "SSH_CONNECTION": "z", "HOSTNAME": "h", "BASH_FUNC_f%%": "f", "TEXT": "a b"}
    assert carry.lines({**shell, "CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}) == [
        "HF_HOME=/x",
        "CUDA_VISIBLE_DEVICES=1",
    ]


def test_the_file_is_there_while_it_is_needed() -> None:
    with carry.carried({"A": "1"}) as told:
        path = Path(told["DS_ENV_FILE"])
        assert path.read_text().splitlines()[-1] == "A=1"
        assert path.stat().st_mode & 0o077 == 0  # there may be secrets in it
    assert not path.exists()
