"""The blocks of the document about Megatron-LM run, with stand-ins for CUDA where there is none."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.docs.blocks import Block, in_runs, read_blocks
from tests.docs.runner import PLAIN_PROCESS, SECONDS, check_examples, run_blocks, run_python
from tests.harness import run_world

DOCUMENT = "docs/megatron.md"


def on_host(blocks: list[Block]) -> None:
    if not torch.cuda.is_available():
        from tests.megatron import on_cpu

        on_cpu.install()
    run_python(blocks)


def test_the_document_runs(tmp_path: Path) -> None:
    blocks = read_blocks(Path(__file__).resolve().parents[2] / DOCUMENT, DOCUMENT)
    check_examples(blocks)
    for run in in_runs(blocks):
        if run[0].language == "python":
            env = None if run[0].world else PLAIN_PROCESS
            run_world(on_host, run[0].world or 1, run, timeout=SECONDS, env=env, cwd=tmp_path)
        else:
            run_blocks(run, tmp_path)
