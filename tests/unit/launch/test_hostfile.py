"""Hostfiles of DeepSpeed, and the filters that choose from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch import hostfile

HOSTS = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def test_a_hostfile(path: Path) -> None:
    path.write_text("# two machines\n\nworker-1 slots=4\n  10.0.0.2\tslots=2 max_slots=2\n")
    assert hostfile.read(str(path)) == {"worker-1": [0, 1, 2, 3], "10.0.0.2": [0, 1]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a slots=1\nb 2\n", "Line 2 of the hostfile .* reads 'b 2'"),
        ("a slots=x\n", "Line 1 .* reads 'a slots=x'"),
        ("a slots=2x\n", "Line 1 .* reads 'a slots=2x'"),
        ("a slots=1\na slots=2\n", "lists a twice"),
        ("# nobody\n", "lists no machine"),
    ],
)
def test_a_wrong_hostfile(path: Path, text: str, sentence: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        hostfile.read(str(path))


def test_no_hostfile(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"hosts cannot be read .*`--deepspeed_hostfile`"):
        hostfile.read(str(path))


def test_what_is_included() -> None:
    assert hostfile.included(HOSTS, "b@a:2,0") == {"a": [0, 2], "b": [0, 1]}
    assert hostfile.included(HOSTS, "a:1@a:3") == {"a": [1, 3]}


def test_what_is_excluded() -> None:
    assert hostfile.without(HOSTS, "a:0,1@c") == {"a": [2, 3], "b": [0, 1]}
    assert hostfile.without(HOSTS, "b:0@b:1") == {"a": [0, 1, 2, 3], "c": [0]}
    with pytest.raises(ValueError, match="leaves no machine"):
        hostfile.without(HOSTS, "a@b@c")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("d", "names 'd', which the hostfile does not list: it has a, b, c"),
        ("b:2", "names slot 2 of b, whose 2 slots count from 0"),
        ("b:x", "reads 'b:x': after the colon come numbers"),
        ("b:", "reads 'b:'"),
    ],
)
def test_wrong_filters(words: str, sentence: str) -> None:
    for choose, flag in ((hostfile.included, "inclusion"), (hostfile.without, "exclusion")):
        with pytest.raises(ValueError, match=f"`--deepspeed_{flag}_filter` {sentence}"):
            choose(HOSTS, words)
