"""A notebook in a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

# In a process of its own, so that the client's threads and warnings stay there.
CLIENT = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=190, allow_errors=True, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


def run_notebook(path: Path, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Runs a notebook in its folder; returns what each cell of code printed and, where it failed, its error."""
    for library in ("nbclient", "ipykernel"):
        pytest.importorskip(library, reason="needs nbclient and ipykernel, from the test extra")
    # The kernel does not capture what new processes print where it finds itself under pytest.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-c", CLIENT, str(path)]
    done = subprocess.run(
        command, cwd=path.parent, capture_output=True, text=True, timeout=200, env={**environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr
    results = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
            results.append({"text": text, "error": errors[0]["evalue"] if errors else None})
    return results
