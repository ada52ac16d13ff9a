"""A model of transformers with two groups of weights is trained in shards, saved whole by `save_pretrained`, and is the
one that the released package trains and saves, which does not shard on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.test_trainers import RELEASED, logs, pytestmark  # noqa: F401  (the mark skips this file, too)

SHARDED = {"FSDP": {"fsdp_version": 1, "use_orig_params": True}, "FSDP2": {"fsdp_version": 2}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SHARDED)
def test_the_same_weights_are_saved(kind: str, tmp_path: Path) -> None:
    case: tuple[str, int, dict[str, Any]] = ("save_pretrained.py", 2, SHARDED[kind])
    ours = logs(*case, tmp_path / "ours.json", "")
    released = logs(*case, tmp_path / "released.json", str(RELEASED))
    assert ours.keys() == released.keys() and ours["width"] == 32
    for name, value in released.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(value), rtol=1e-4, atol=1e-5)


def test_flat_parameters_say_what_to_set_for_two_groups(tmp_path: Path) -> None:
    """One flat parameter cannot be in two groups. The released package would train nothing, silently."""
    with pytest.raises(AssertionError, match="pass use_orig_params=True"):
        logs("save_pretrained.py", 2, {"fsdp_version": 1, "use_orig_params": False}, tmp_path / "ours.json", "")
