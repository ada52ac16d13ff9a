"""`notebook_launcher` in a real Jupyter kernel."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.harness.notebook import run_notebook


def run_cells(cells: list[str], folder: Path) -> list[dict[str, Any]]:
    """What each cell printed and, where it failed, its error."""
    path = folder / "notebook.ipynb"
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cell_list = [{**code, "id": f"c{number}", "source": source} for number, source in enumerate(cells)]
    path.write_text(json.dumps({"cells": cell_list, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return run_notebook(path)


def test_a_notebook(tmp_path: Path) -> None:
    imported, defined, trained, spawned, restarted, failed, late = run_cells(
        [
            "import functools, os, torch\n"
            "from accelerate import Accelerator, notebook_launcher\n"
            "os.environ['ACCELERATE_USE_CPU'] = 'true'\n"
            "launch = functools.partial(notebook_launcher, num_processes=2, use_port='0')\n"
            # threads of OpenMP, for which a fork would wait if it had to use them
            "torch.set_num_threads(2); (torch.ones(500, 500) @ torch.ones(500, 500)).exp().sort()[0].sum()",
            "def train(scale):\n"
            "    accelerator = Accelerator()\n"
            "    model = accelerator.prepare(torch.nn.Linear(500, 500))\n"
            "    accelerator.backward(model(torch.ones(300, 500)).sum())\n"
            "    for number in range(50):\n"
            "        print('rank', accelerator.process_index, 'line', number, 'end')\n"
            "    ranks = accelerator.gather(torch.tensor([accelerator.process_index])) * scale\n"
            "    accelerator.print(f'RANKS {ranks.tolist()} {accelerator.mixed_precision} {torch.get_num_threads()}')\n"
            "def fail():\n"
            "    if Accelerator().process_index == 1:\n"
            "        raise ValueError('the second one is ill')\n"
            "def fail_once(mark):\n"
            "    if Accelerator().process_index == 1 and not os.path.exists(mark):\n"
            "        open(mark, 'w').close()\n"
            "        raise ValueError('only the first time')\n",
            "launch(train, (10,), mixed_precision='bf16')",
            "launch(train, (3,), start_method='spawn')",
            f"launch(fail_once, ({str(tmp_path / 'mark')!r},), max_restarts=1)",
            "launch(fail)",
            "accelerator = Accelerator()\nlaunch(train, (1,))",
        ],
        tmp_path,
    )
    assert imported["error"] is None and defined["error"] is None
    assert trained["error"] is None and "RANKS [0, 10] bf16 1" in trained["text"]
    lines = [line for line in trained["text"].splitlines() if "end" in line]
    assert sorted(lines) == sorted(f"rank {rank} line {number} end" for rank in (0, 1) for number in range(50))
    assert spawned["error"] is None and "RANKS [0, 3] no" in spawned["text"]
    assert restarted["error"] is None
    assert "Rank 1 of fail failed" in failed["error"]
    assert failed["error"].rstrip().endswith("ValueError: the second one is ill")
    assert "raise ValueError('the second one is ill')" in failed["error"]
    assert "has already been created in this notebook" in late["error"]


def test_an_interrupted_cell_ends_as_one_that_ran_here(tmp_path: Path) -> None:
    """A kernel is interrupted together with its processes, which torch elastic then interrupts once more."""
    script = tmp_path / "cell.py"
    script.write_text(
        "import os, sys, time\n"
        "from accelerate import PartialState, notebook_launcher\n"
        "def train(folder):\n"
        "    rank = PartialState().process_index\n"
        "    open(f'{folder}/{rank}-{os.getpid()}', 'w').close()\n"
        "    time.sleep(100)\n"
        "notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port='0')\n"
    )
    (tmp_path / "ready").mkdir()
    cell = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "ready")],
        stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    while len(ready := os.listdir(tmp_path / "ready")) < 2:
        assert cell.poll() is None
        time.sleep(0.05)
    os.killpg(cell.pid, signal.SIGINT)
    for _ in range(20):
        for name in ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name.split("-")[1]), signal.SIGINT)
        time.sleep(0.001)
    _, said = cell.communicate(timeout=60)
    assert said.rstrip().endswith("KeyboardInterrupt"), said
    assert said.count("Traceback") == 1 and "elastic" not in said, said
