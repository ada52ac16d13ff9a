"""The guide from release 1.15 begins with a script that runs there; the one at its end gives the same numbers here.

Usage: python -m tests.peer.migration PATH_TO_THE_PYTHON_OF_THE_RELEASED_PACKAGE
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import read_blocks

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "docs/migration/release-1.15.md"


def run(python: str, source: str, folder: str, **variables: str) -> None:
    # What is on the path of this process would come before what that Python has installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-c", source], cwd=folder, env={**environment, **variables}, check=True)


def main(peer: str) -> None:
    before, after = read_blocks(ROOT / GUIDE, GUIDE)
    released = "import accelerate; assert accelerate.__version__.startswith('1.15')\n"
    with tempfile.TemporaryDirectory() as folder:
        run(peer, released + before.source, folder)
        run(sys.executable, after.source, folder, PYTHONPATH=str(ROOT / "src"))
    print(f"both scripts of {GUIDE} end with the same numbers")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
