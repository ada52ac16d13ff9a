"""A hang over NCCL, and over gloo with tensors of one GPU, says which rank waits where."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from accelerate.diagnosis import limits
from tests.gpu.checks import check

# The second rank never comes to the collective. On one GPU it could not: NCCL takes one rank for each.
SCRIPT = """
import time, torch
from accelerate import Accelerator, InitProcessGroupKwargs
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend={backend!r})])
if accelerator.process_index == 1:
    time.sleep(1000)
{call}
torch.cuda.synchronize()
"""


def _told(backend: str | None, call: str) -> str:
    """What two processes on one GPU say when the second does not come to the call."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(backend=backend, call=call))
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
            env={**os.environ, limits.LIMIT: "3", limits.ACTION: "abort", "PYTHONPATH": os.path.abspath("src")},
            cwd=folder,  # where the stacks are written
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert done.returncode != 0 and "The ranks wait for each other" in done.stderr, done.stdout + done.stderr
    return done.stderr


@check
def a_hang_over_nccl_names_its_ranks() -> None:
    for call, name in (
        ("accelerator.gather(torch.ones(3, device=accelerator.device))", "gather"),
        ("torch.distributed.all_reduce(torch.ones(3, device=accelerator.device))", "all_reduce"),
    ):
        told = _told(None, call)
        assert f"rank 0 waits in {name} (train.py:7)" in told and "rank 1 runs train.py:6" in told, told


@check
def a_hang_over_gloo_on_a_gpu_names_its_ranks() -> None:
    told = _told("gloo", "accelerator.reduce(torch.ones(3, device=accelerator.device))")
    assert "rank 0 waits in reduce (train.py:7)" in told and "rank 1 runs train.py:6" in told, told
