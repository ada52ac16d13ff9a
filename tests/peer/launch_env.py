"""Compare, case by case, what this package and the released one tell the processes they launch.

    python tests/peer/launch_env.py PYTHON_OF_THE_RELEASED_PACKAGE

Exits with 1 when something differs that `cases.json` does not list under `differs`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.unit.launch.cases import CASES, outcome  # noqa: E402


def ask_peer(python: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "cases.json", Path(folder) / "answers.json"
        asked.write_text(json.dumps(CASES))
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "OMP_", "PYTHON"))}
        subprocess.run(
            [python, str(HERE / "launch_capture.py"), str(asked), str(answered)],
            check=True,
            env={**environ, "HF_HOME": folder},
            cwd=folder,
        )
        answers: dict[str, Any] = json.loads(answered.read_text())
        return answers


def differences(case: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    if "error" in ours or "error" in theirs:
        return [] if ("error" in ours) == ("error" in theirs) else ["outcome"]
    found = [] if ours["engine"] == theirs["engine"] else ["engine"]
    ignored = {"OMP_NUM_THREADS", "PYTHONPATH", *case.get("environ", {})}
    names = ({*ours["env"], *theirs["env"]}) - ignored
    if theirs["words"][:1] == ["deepspeed"]:
        # Ours is the same program by its module, and what looks after it.
        found += [] if _of_deepspeed(ours["command"]) == sorted(theirs["words"][1:]) else ["words"]
    return found + sorted(name for name in names if ours["env"].get(name) != theirs["env"].get(name))


def _of_deepspeed(command: list[str]) -> list[str]:
    return sorted(command[command.index("deepspeed.launcher.runner") + 1 :])


def main() -> int:
    theirs = ask_peer(os.path.abspath(sys.argv[1]))
    unexpected = 0
    for name, case in CASES.items():
        found = differences(case, outcome(case), theirs[name])
        listed = case.get("differs", [])
        if found != listed:
            unexpected += 1
            print(f"{name}: differs in {found}, expected {listed}")
    on_purpose = sum("differs" in case for case in CASES.values())
    print(f"{len(CASES)} cases, {on_purpose} differ on purpose, {unexpected} do not match")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
