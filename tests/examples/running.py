"""Runs an example as its reader would: as a script, in a folder of its own, on one process or several."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from tests.docs.runner import PLAIN_PROCESS
from tests.harness import world_outcomes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# What libraries say of themselves: warnings, each with the line that it is about, profiles, compilations.
_OF_OTHERS = r"^(\S*/site-packages/.*Warning: .*\n  .*|USDT:.*|DeepSpeed .* built successfully)\n"

QUIET: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def as_script(name: str, *words: str) -> None:
    """On a rank: the example as `__main__`."""
    path = str(EXAMPLES / name)
    sys.argv = [path, *words]
    sys.path.insert(0, str(EXAMPLES))  # as Python does
    runpy.run_path(path, run_name="__main__")


def printed(
    name: str, processes: int, folder: Path, *words: str, timeout: float = 150.0, ends: str = "finished"
) -> list[str]:
    """The lines that an example prints, which are those of its main process, and none of them a warning."""
    __tracebackhide__ = True
    env = QUIET | (PLAIN_PROCESS if processes == 1 else {})
    outcomes = world_outcomes(as_script, processes, name, *words, env=env, cwd=folder, timeout=timeout)
    for outcome in outcomes:
        assert outcome.reason == ends, f"{outcome.traceback}\n{outcome.output}"
    main, *others = (re.sub(_OF_OTHERS, "", outcome.output + "\n", flags=re.MULTILINE) for outcome in outcomes)
    assert "Warning: " not in main, main
    assert [other.strip() for other in others] == [""] * len(others), "an example prints on its main process alone"
    return main.splitlines()


def on_one_and_two(name: str, folder: Path, *words: str) -> tuple[list[str], list[str]]:
    """What it prints on one process, and on two."""
    __tracebackhide__ = True
    runs = []
    for processes in (1, 2):
        own = folder / str(processes)
        own.mkdir(exist_ok=True)
        runs.append(printed(name, processes, own, *words))
    return runs[0], runs[1]


def assert_learned(line: str) -> tuple[float, float]:
    """An example's last line says what has become of its loss, or of its score, and that is plainly better."""
    found = re.search(r"(rose|fell) from (\S+) to (\S+)$", line)
    assert found is not None, line
    before, after = float(found[2]), float(found[3])
    assert after > before + 0.3 if found[1] == "rose" else after < before / 2, line
    return before, after
