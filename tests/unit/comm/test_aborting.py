"""A rank that is told to leave aborts its group. NCCL needs GPUs (tests/gpu/two_ranks.py): the group is a stand-in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from accelerate.comm import aborting
from accelerate.comm.aborting import AbortOnWord

KEYS = ["leave/0", "leave/1"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ranks, an event for each that is set when its group is aborted, and how often that happened."""
    server: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counts, events = [0, 0], [threading.Event(), threading.Event()]

    def abort(rank: int) -> None:
        counts[rank] += 1
        events[rank].set()

    monkeypatch.setattr(aborting, "abort", abort)
    both = []
    for rank in range(2):
        waiting, telling = (dist.TCPStore("127.0.0.1", server.port, None, False) for _ in range(2))
        both.append(AbortOnWord(waiting, telling, KEYS, rank))
        both[-1]._group = rank
    yield server, both, events, counts
    for each in both:
        each.close()
        assert not each._thread.is_alive()


def test_a_rank_that_has_broken_off_makes_the_others_leave(ranks: Any) -> None:
    _, (first, second), (left, _), counts = ranks
    second.others_leave()
    assert left.wait(60)
    first.close()
    first.leave()  # as where all of them meet again
    assert counts == [1, 1]


def test_nobody_leaves_without_a_word(ranks: Any) -> None:
    _, (first, second), _, counts = ranks
    first.close()
    second.close()
    assert counts == [0, 0]
