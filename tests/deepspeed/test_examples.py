"""The example does what it says: without DeepSpeed, and on two processes with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.running import assert_learned, printed

pytest.importorskip("deepspeed", reason="needs deepspeed")
ZERO_3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def test_learns_in_pieces_and_saves_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = printed("deepspeed_zero.py", 1, tmp_path)
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "runs/deepspeed/model.safetensors").items()}
    for name, value in ZERO_3.items():
        monkeypatch.setenv(name, value)
    together = printed("deepspeed_zero.py", 2, tmp_path)
    assert alone[-1].startswith("NO, ") and together[-1].startswith("DEEPSPEED, ")
    for lines in (alone, together):
        assert_learned(lines[-1])
    saved = load_file(tmp_path / "runs/deepspeed/model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == shapes
