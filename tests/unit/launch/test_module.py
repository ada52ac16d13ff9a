"""A module that is not there is told before anything starts, without running code of its packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate.launch.module import why_not


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = ("pkg/__init__.py", "pkg/train.py", "pkg/sub/run.py", "pkg/whole/__main__.py", "train.py", "plain/x.txt")
    for name in (*files, "wide/__init__.py", "wide/a.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('this ran')\n")
    (tmp_path / "wide/__init__.py").write_text("__path__.append('elsewhere')\nraise AssertionError('this ran')\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/__init__.py").write_text("__import__('pkg_resources').declare_namespace(__name__)\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert "pkg" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        *("pkg.train", "train", "pkg.sub.run", "pkg.whole", "wide.a", "wide.elsewhere", "old.elsewhere"),
        *("json.tool", "os", "zipimport"),
    ],
)
def test_modules_that_can_be_run_or_may_be(name: str) -> None:
    assert why_not(name) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pkg/train.py", "is that of a file: write `-m pkg.train`, or leave out `-m`."),
        ("./pkg/train", "is that of a file: write `-m pkg.train`, or leave out `-m`."),
        ("pkg.train.py", "is that of a file: write `-m pkg.train`, or leave out `-m`."),
        ("train.py", "is that of a file: write `-m train`, or leave out `-m`."),
        ("../train.py", "is that of a file: leave out `-m`."),
        ("pkg.trian", "There is no module pkg.trian (did you mean `pkg.train`?) in the package pkg: correct its name."),
        ("pkgs.train", "There is no module pkgs (did you mean `pkg`?) in the folder "),
        ("pkg.sub.nothing", "There is no module pkg.sub.nothing in the package pkg.sub: correct its name."),
        ("train.more", "There is no module train.more in the package train: correct its name."),
        ("pkg", "pkg is a package without a `__main__`: name one of its modules, as in `-m pkg.train`."),
        ("plain", "plain is a package without a `__main__`: name one of its modules, as in `-m plain.train`."),
    ],
)
def test_modules_that_cannot(name: str, sentence: str) -> None:
    problem = why_not(name)
    assert problem is not None and sentence in problem
    assert len(problem.splitlines()) == 1


def test_a_finder_of_somebody_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, path: object) -> object:
            return self if name == "pkg.made" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert why_not("pkg.made") is None
    assert why_not("pkg.other") is not None
