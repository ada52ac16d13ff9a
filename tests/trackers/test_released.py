"""Every tracker beside that of the released package, with the real libraries, offline: the same lands on disk.

`make trackers` puts the released package into a folder beside its environment; first on the path, it takes this one's
place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trackers.test_libraries import HERE, NAMES, OFFLINE, ROOT, require

LIMIT = 250  # seconds that a script may take
RELEASED = Path(sys.prefix) / "released"
# What the released package adds to the settings of a run by itself.
ITS_OWN = {"swanlab": {"FRAMEWORK", "allow_val_change"}, "trackio": {"allow_val_change"}}
# A tracker that has been made and not started has opened nothing.
BEFORE = {
    name: {"before it starts": "None" if name == "dvclive" else "AttributeError", "files before it starts": []}
    for name in NAMES
}

pytestmark = pytest.mark.skipif(
    not RELEASED.is_dir() and not os.environ.get("REQUIRE_TRACKERS"),
    reason="needs the released package beside the libraries: make trackers",
)


def lands_on_disk(name: str, how: str, folder: Path, path: Path | None) -> dict[str, Any]:
    """What the script leaves, with the package that lies first on the path."""
    variables, init_kwargs = OFFLINE[name]
    folder.mkdir()
    home = {"HOME": str(folder), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    first = [] if path is None else [str(path)]

    def run(script: str, path: list[str], *args: str) -> str:
        given = [*path, *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
        environ = os.environ | variables | home | {"PYTHONPATH": os.pathsep.join(given)}
        # A run that hangs says in its last words, on stderr, where.
        where = [
            "-c",
            f"import faulthandler, runpy, sys; faulthandler.dump_traceback_later({LIMIT}, exit=True); "
            "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
        ]
        command = [sys.executable, *where, str(HERE / script), name, *args]
        result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-8000:]
        return result.stdout

    output = run("same.py", first, json.dumps(init_kwargs), how)
    found: dict[str, Any] = json.loads(run("read.py", []).splitlines()[-1])
    said = [line for line in output.splitlines() if line.startswith('{"before it starts"')]
    for key in ITS_OWN.get(name, set()):
        found["config"].pop(key, None)
    return found | {"said": said}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("how", ["accelerator", "alone"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_lands_on_disk(name: str, how: str, tmp_path: Path) -> None:
    require(name)
    ours = lands_on_disk(name, how, tmp_path / "ours", None)
    assert ours == lands_on_disk(name, how, tmp_path / "released", RELEASED)
    assert ours["scalars"]["loss"][0] == [0, 1.5]
    assert ours["said"] == ([] if how == "accelerator" else [json.dumps(BEFORE[name])])
