"""The first script a newcomer runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import world_outcomes

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"


def run_script(output: str) -> None:
    sys.argv = [str(SCRIPT), "--output", output]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize("processes", [1, 2])
def test_quickstart_learns_to_read_digits(processes: int, tmp_path: Path) -> None:
    model = tmp_path / "new" / "model.pt"
    # Without a GPU, nothing but torchrun's own variables is needed to be one world.
    env = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": None}
    outcomes = world_outcomes(run_script, processes, str(model), env=env)
    assert [outcome.reason for outcome in outcomes] == ["finished"] * processes, outcomes[0].traceback

    main, *others = (outcome.output for outcome in outcomes)
    accuracy = re.search(r"accuracy on 359 digits never seen in training: (\S+)", main)
    assert accuracy is not None and float(accuracy[1]) >= 0.95
    assert f"model saved to {model}" in main and "training: 100%" in main
    assert others == [""] * len(others)  # one progress bar, one set of messages

    make_model = runpy.run_path(str(SCRIPT))["make_model"]
    make_model().load_state_dict(torch.load(model, weights_only=True))
