"""Optimizer states and parameters in files of a folder, as on an NVMe disk: trained and resumed as if in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from tests.deepspeed import training
from tests.harness import run_world

# DeepSpeed leaves what takes less than a MiB in memory: each of two processes has as much of these.
WIDTH = 1 << 17


def prepared(folder: str | None, precision: str, parts: tuple[str, ...], seed: int = 0) -> tuple[Accelerator, Any, Any]:
    """folder: None for DDP. parts: what lies there."""
    acc = training.accelerator(None if folder is None else 3, precision=precision, accumulate=2)
    if folder is not None:
        zero = acc.deepspeed_plugin.deepspeed_config["zero_optimization"]
        sizes = {"offload_param": {"buffer_count": 8, "buffer_size": 1 << 20}, "offload_optimizer": {}}
        zero |= {part: {"device": "nvme", "nvme_path": folder, **sizes[part]} for part in parts}
    net: Any = training.model(seed, WIDTH)
    *most, last = net.parameters()
    # The second group is small, and stays in memory.
    optimizer: Any = torch.optim.AdamW([{"params": most}, {"params": [last], "lr": 0.1}], lr=3e-5, eps=1e-3)
    net, optimizer, _ = acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4))
    return acc, net, optimizer


def steps(acc: Accelerator, net: Any, optimizer: Any, first: int) -> list[float]:
    """Two steps of two micro-batches; what processes have is not the same."""
    inputs, targets = training.data().tensors
    losses = []
    for number in range(first, first + 4):
        rows = slice(8 * number + 4 * acc.process_index, 8 * number + 4 * acc.process_index + 4)
        with acc.accumulate(net):
            loss = training.loss_of(net(inputs[rows]), targets[rows])
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def end(acc: Accelerator) -> None:
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)


def on_a_disk(folder: str) -> None:
    """Nothing goes through the folder for temporary files, which may be small: states go straight where they belong."""
    tempfile.tempdir = str(Path(folder, "tmp"))
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    copy_tree = shutil.copytree

    def watched(source: Any, target: Any, **kwargs: Any) -> Any:
        assert not (Path(target).is_relative_to(tempfile.gettempdir()) and os.listdir(source)), source
        return copy_tree(source, target, **kwargs)

    shutil.copytree = watched
    with pytest.raises(ValueError, match="would round parameters on a disk to bf16 on this cpu"):
        prepared(folder, "no", ("offload_param",))
    Accelerator().state._reset_state(reset_partial_state=False)
    optimizer_alone, both = ("offload_optimizer",), ("offload_optimizer", "offload_param")
    for precision, parts, close in (
        ("no", optimizer_alone, {"rtol": 1e-5, "atol": 1e-6}),
        ("bf16", both, {"rtol": 0.03, "atol": 0.01}),
    ):
        acc, net, optimizer = prepared(None, precision, ())
        expected = steps(acc, net, optimizer, 0) + steps(acc, net, optimizer, 4)
        end(acc)
        swapped = Path(folder, precision)
        swapped.mkdir(exist_ok=True)
        acc, net, optimizer = prepared(str(swapped), precision, parts)
        found = steps(acc, net, optimizer, 0)
        assert list(swapped.rglob("*.swp")), f"{list(swapped.rglob('*'))}: nothing lies on the disk"
        # Behind the training it cannot be, since that writes into the files.
        acc.save_state(Path(folder, "state"), async_save=True)
        found += steps(acc, net, optimizer, 4)
        acc.wait_for_checkpoint()
        torch.testing.assert_close(found, expected, **close)
        end(acc)
        for _ in range(2):  # the second time, of what is saved where files of engines before are left
            acc, net, optimizer = prepared(str(swapped), precision, parts, seed=5)
            acc.load_state(Path(folder, "state"))
            acc.save_state(Path(folder, "state"))
            assert steps(acc, net, optimizer, 4) == found[4:]
            end(acc)


@pytest.mark.skipif(
    not Path(os.environ["TORCH_EXTENSIONS_DIR"], "async_io", "async_io.so").exists(),
    reason="needs DeepSpeed's async_io: install libaio-dev and g++, then run tests/deepspeed/build_ops.py",
)
def test_as_in_memory(tmp_path: Path) -> None:
    run_world(on_a_disk, 2, str(tmp_path), timeout=120)
