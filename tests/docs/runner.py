"""Runs the blocks of one file, in order, in one folder: Python in forked processes, shell in bash."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.blocks import Block, in_runs
from tests.harness import run_world
from tests.harness.state import reset_state

# A reader who types `python script.py` has none of these.
PLAIN_PROCESS = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
SECONDS = 200.0


def check_examples(blocks: list[Block]) -> None:
    """Examples are not run, but must be code."""
    for block in blocks:
        if not block.example:
            continue
        if block.language == "python":
            compile(block.source, block.place, "exec")
        else:
            check = subprocess.run(["bash", "-n"], input=block.source, capture_output=True, text=True)
            assert check.returncode == 0, f"{block.place}: {check.stderr}"


def run_blocks(blocks: list[Block], folder: Path) -> None:
    __tracebackhide__ = True
    for run in in_runs(blocks):
        if run[0].language == "bash":
            _run_bash(run[0], folder)
        else:
            processes, env = (run[0].world, None) if run[0].world else (1, PLAIN_PROCESS)
            run_world(run_python, processes, run, timeout=SECONDS, env=env, cwd=folder)


# Of blocks that were run: freeing a process group can wait for ever for a thread of it that waits for Python's lock.
_KEPT: list[dict[str, Any]] = []


def run_python(blocks: list[Block]) -> None:
    """On a rank: execute the blocks, each in a namespace of its own unless it continues the one before."""
    namespace: dict[str, Any] = {}
    for block in blocks:
        if not block.continues:
            _forget_state()
            namespace = {"__name__": "__main__"}
            _KEPT.append(namespace)
        # Errors then show the block's own lines, under the document's name and numbering.
        source = "\n" * (block.line - 1) + block.source
        linecache.cache[block.file] = (len(source), None, source.splitlines(keepends=True), block.file)
        exec(compile(source, block.file, "exec", dont_inherit=True), namespace)


def _forget_state() -> None:
    import torch.distributed as dist

    reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_bash(block: Block, folder: Path) -> None:
    __tracebackhide__ = True
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.source],
        cwd=folder,
        env={**os.environ, "PATH": search, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, f"{block.place}: exit code {result.returncode}\n{result.stdout}"
