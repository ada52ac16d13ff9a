from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.devices.staging import Job, Stager
from accelerate.io.stored_tensors import FileRange
from tests.unit.devices.lanes import FakeLane

ROOT = Path(__file__).parents[3]


@pytest.fixture
def lane() -> FakeLane:
    return FakeLane()


def finish(job: Job) -> None:
    """Wait for a job as a device would: until its mark, and no further."""
    assert job.over.wait(20)
    if job.error is not None:
        raise job.error
    job.mark.synchronize()


def in_file(path: Path, value: torch.Tensor, before: bytes = b"") -> FileRange:
    path.write_bytes(before + value.view(-1).view(torch.uint8).numpy().tobytes())
    return FileRange(str(path), len(before), tuple(value.shape), value.dtype)


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_memory_and_files_through_few_buffers(readers: int, tmp_path: Path) -> None:
    """All bytes are there at the mark of their job, in whatever order the readers were."""
    lane = FakeLane()
    stager = Stager(lane, part=1000, readers=readers)
    torch.manual_seed(0)
    values = [torch.randn(777), torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(250), torch.tensor(3.0)]
    sources: list[Any] = [*values[:2], in_file(tmp_path / "f", values[2], b"12345678"), values[3]]
    for _ in range(3):
        if readers > 1:
            lane.cross()
        outs = [torch.zeros_like(value) for value in values]
        jobs = [stager.bring([pair]) for pair in zip(sources, outs, strict=True)]
        together = [torch.zeros_like(value) for value in values]
        jobs.append(stager.bring(list(zip(sources, together, strict=True))))
        for job, out, value in zip(jobs[:-1], outs, values, strict=True):
            finish(job)
            assert torch.equal(out, value)
        finish(jobs[-1])
        assert all(torch.equal(out, value) for out, value in zip(together, values, strict=True))
    assert len(lane.entered) == readers
    assert all(lane.buffers.count(reader) <= 2 for reader in lane.entered)
    assert lane.senders <= set(lane.entered) and len(lane.senders) >= min(readers, 2)
    stager.close()


def test_no_thread_is_left_when_python_ends(tmp_path: Path) -> None:
    """One that is inside of torch then takes the process down with it."""
    script = """
import atexit, threading, torch
from accelerate.devices.staging import Stager
from tests.unit.devices.lanes import FakeLane
atexit.register(lambda: print("left:", [t.name for t in threading.enumerate() if t.name == "reader"]))  # runs last
stager = Stager(FakeLane(), part=1000, readers=3, name="reader")
job = stager.bring([(torch.ones(1 << 20), torch.zeros(1 << 20))])
print("begun:", len([t for t in threading.enumerate() if t.name == "reader"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (0, "begun: 3\nleft: []\n"), done.stderr


def test_nothing_to_bring(lane: FakeLane) -> None:
    stager = Stager(lane)
    job = stager.bring([(torch.empty(0), torch.empty(0))])
    assert job.over.is_set() and job.mark is None and job.error is None
    assert lane.entered == []
    stager.close()


def test_an_error_reaches_who_waits(lane: FakeLane, tmp_path: Path) -> None:
    stager = Stager(lane, part=64, readers=4)
    lost = stager.bring([(FileRange(str(tmp_path / "none"), 0, (4,), torch.float32), torch.empty(4))])
    (tmp_path / "short").write_bytes(b"123" * 100)
    short = stager.bring([(FileRange(str(tmp_path / "short"), 0, (200,), torch.float32), torch.empty(200))])
    value, out = torch.randn(100), torch.zeros(100)
    fine = stager.bring([(value, out)])
    with pytest.raises(FileNotFoundError):
        finish(lost)
    with pytest.raises(OSError, match="ended while"):
        finish(short)
    assert short.mark is not None  # some of it is on its way: the memory must not be used before
    finish(fine)
    assert torch.equal(out, value)
    stager.close()


def test_an_error_of_the_device_reaches_who_waits(lane: FakeLane) -> None:
    stager = Stager(lane, part=64, readers=2)
    refuse = pytest.MonkeyPatch()
    refuse.setattr(lane, "buffer", lambda size: torch.empty(-1))
    with pytest.raises(RuntimeError, match="negative"):
        finish(stager.bring([(torch.randn(100), torch.zeros(100))]))
    refuse.undo()
    value, out = torch.randn(100), torch.zeros(100)
    finish(stager.bring([(value, out)]))
    assert torch.equal(out, value)
    stager.close()


def test_a_cancelled_job_ends(tmp_path: Path) -> None:
    lane, gate = FakeLane(), threading.Event()
    send = lane.send

    def wait_and_send(*args: Any) -> None:
        assert gate.wait(60)
        send(*args)

    lane.send = wait_and_send  # type: ignore[method-assign,assignment]
    stager = Stager(lane, part=16, readers=2)
    value = torch.randn(10_000)
    job = stager.bring([(in_file(tmp_path / "f", value), torch.zeros(10_000))])
    job.cancelled = True
    gate.set()
    assert job.over.wait(20)
    assert len(lane.outs) <= 2, "what a reader had in its hands then"
    out = torch.zeros(100)
    finish(stager.bring([(value[:100], out)]))
    assert torch.equal(out, value[:100])
    stager.close()


def test_files_are_closed(lane: FakeLane, tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    stager = Stager(lane, part=16, readers=2)
    place = in_file(tmp_path / "f", torch.randn(100))
    lost = FileRange(str(tmp_path / "none"), 0, (4,), torch.float32)
    before = open_files()
    for _ in range(5):
        finish(stager.bring([(place, torch.zeros(100))]))
        assert stager.bring([(place, torch.zeros(100)), (lost, torch.empty(4))]).over.wait(20)
    assert open_files() == before
    stager.close()


def test_no_memory_of_the_device_is_kept(lane: FakeLane) -> None:
    """Once a job is over, the readers, which wait for the next one, have let go of its tensors."""
    stager = Stager(lane, part=16, readers=4)
    for _ in range(10):
        job = stager.bring([(torch.randn(100), torch.zeros(100))])
        finish(job)
        assert not any(ref() is not None for ref in lane.outs)
    stager.close()


def test_close_finishes_what_was_begun_and_ends_the_threads(lane: FakeLane) -> None:
    def alive() -> int:
        return sum(thread.name == "offload-reader" for thread in threading.enumerate())

    stager = Stager(lane, part=16, readers=5)
    value, out = torch.randn(1000), torch.zeros(1000)
    job = stager.bring([(value, out)])
    assert alive() == 5
    stager.close()
    assert alive() == 0
    finish(job)
    assert torch.equal(out, value)


def test_closed_by_one_of_its_own_readers(lane: FakeLane) -> None:
    """Where the garbage collector happens to run."""
    stager = Stager(lane, part=16, readers=3)
    send = lane.send
    closed = threading.Event()

    def closing(*args: Any) -> None:
        send(*args)
        if not closed.is_set():
            closed.set()
            stager.close()

    finish(stager.bring([(torch.randn(4), torch.zeros(4))]))
    lane.send = closing  # type: ignore[method-assign,assignment]
    threads = stager._threads
    value, out = torch.randn(4), torch.zeros(4)
    finish(stager.bring([(value, out)]))
    assert torch.equal(out, value)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
