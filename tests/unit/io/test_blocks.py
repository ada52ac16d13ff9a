from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.devices.staging import PlainLane
from accelerate.errors import CheckpointError
from accelerate.io import read_tensors
from accelerate.io.blocks import BLOCK, write_file
from accelerate.io.read_tensors import read_file

STARTS = [0, 10, 1001, BLOCK - 7, 2 * BLOCK - 500, 3 * BLOCK + 1]
SIZES = [10, 991, 4000, BLOCK - 1000, BLOCK + 501, 12344]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_blocks_for_a_device_go_by_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor gets what is its own, whether it stays on the host or not; nothing of a damaged block is sent."""
    content = torch.randint(0, 256, (3 * BLOCK + 12345,), dtype=torch.uint8)
    entry = write_file(tmp_path / "x", [content])
    places = [(start, torch.zeros(size, dtype=torch.uint8)) for start, size in zip(STARTS, SIZES, strict=True)]
    # Every second one stands for a tensor of a GPU.
    away = {address(tensor) for _, tensor in places[::2]}
    sent: list[int] = []

    class Lane(PlainLane):
        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("cpu")

        def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Any) -> None:
            sent.extend(map(address, outs))
            super().send(outs, content, mark)

    monkeypatch.setattr(read_tensors, "_is_away", lambda tensor: address(tensor) in away)
    monkeypatch.setattr(read_tensors, "lane_of_caller", Lane)
    for known in (entry, None):
        sent.clear()
        for _, tensor in places:
            tensor.zero_()
        read_file(tmp_path / "x", places, known)
        assert set(sent) == away
        assert all(torch.equal(tensor, content[start : start + len(tensor)]) for start, tensor in places)

    damaged = bytearray(content.numpy().tobytes())
    damaged[5] ^= 1
    (tmp_path / "x").write_bytes(damaged)
    for _, tensor in places:
        tensor.zero_()
    with pytest.raises(CheckpointError, match="is damaged"):
        read_file(tmp_path / "x", places, entry)
    assert not places[0][1].any()  # it goes to the GPU from the block that is damaged


@pytest.mark.parametrize("most", [0, 1])
def test_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Where no more threads can be started, as when Python ends, those that have do the work, or the caller."""
    content = torch.randint(0, 256, (3 * BLOCK + 5,), dtype=torch.uint8)
    entry = write_file(tmp_path / "x", [content])
    found = torch.zeros_like(content)
    left, start = [True] * most, threading.Thread.start

    def started(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(self)

    monkeypatch.setattr(read_tensors.blocks, "CHECKERS", 4)
    monkeypatch.setattr(threading.Thread, "start", started)
    read_file(tmp_path / "x", [(0, found)], entry)
    assert torch.equal(found, content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_file(tmp_path / "x", [(0, found)], entry._replace(crc32=[0] * 4))
