"""Modules whose names stand in their stub."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

MODULE = "from accelerate.lazy import lazy\n\n__getattr__, __dir__, __all__ = lazy(__name__)\n"
FILES = {
    "lazy_sample/__init__.py": MODULE,
    "lazy_sample/__init__.pyi": (
        "from typing import Any\n"
        "from json import (\n    dumps as dumps,\n    loads as parse,\n)\n"
        "from lazy_sample import tools as tools\n"
        "from lazy_sample.tools import *\n\n"
        "__version__: str\n"
    ),
    "lazy_sample/tools.py": MODULE,
    "lazy_sample/tools.pyi": "from math import pi as pi\nfrom math import tau as _tau\nfrom nowhere import x as x\n",
    "lazy_sample/plain.py": "VALUE = 1\n",
}


@pytest.fixture(params=["folder", "zip"])
def sample(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in a folder, or in an archive."""
    place = tmp_path / request.param
    if request.param == "zip":
        with zipfile.ZipFile(place, "w") as archive:
            for name, text in FILES.items():
                archive.writestr(name, text)
    else:
        for name, text in FILES.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    monkeypatch.syspath_prepend(str(place))
    for module in [name for name in sys.modules if name.startswith("lazy_sample")]:
        monkeypatch.delitem(sys.modules, module)
    return "lazy_sample"


def test_names_of_the_stub_are_found(sample: str) -> None:
    package = importlib.import_module(sample)
    assert package.__all__ == ["dumps", "parse", "pi", "x"]
    assert "lazy_sample.tools" not in sys.modules, "nothing is imported before it is used"
    assert package.parse("[1]") == [1] and package.dumps([1]) == "[1]"
    assert package.pi == sys.modules["math"].pi  # type: ignore[attr-defined]
    assert package.tools._tau > 6 and package.plain.VALUE == 1
    assert {"tools", "pi", "parse"} <= set(dir(package))


def test_what_is_not_there(sample: str) -> None:
    package = importlib.import_module(sample)
    for name in ("_tau", "Any", "loads", "nothing"):
        with pytest.raises(AttributeError, match=f"module 'lazy_sample' has no attribute '{name}'"):
            getattr(package, name)
    with pytest.raises(AttributeError, match=r"module 'lazy_sample\.tools' has no attribute 'nothing'"):
        package.tools.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        package.x  # noqa: B018
