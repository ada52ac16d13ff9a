"""The profiler: schedules, traces of every rank, what `on_trace_ready` sees, memory and flops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, ProfileKwargs
from tests.harness import run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")


def work() -> None:
    torch.randn(32, 32) @ torch.randn(32, 32)


def test_schedule_and_on_trace_ready() -> None:
    cycles: list[int] = []

    def ready(profiler: Any) -> None:
        [product] = [event for event in profiler.key_averages() if event.key == "aten::mm"]
        cycles.append(product.count)

    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    kwargs = ProfileKwargs(activities=["cpu"], schedule_option=schedule, on_trace_ready=ready)
    with Accelerator(cpu=True).profile(kwargs) as profiler:
        for _ in range(10):
            work()
            profiler.step()
    assert cycles == [2, 2]


def test_memory_shapes_and_flops() -> None:
    kwargs = ProfileKwargs(activities=["cpu"], profile_memory=True, record_shapes=True, with_flops=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    with accelerator.profile() as profiler:
        work()
    [product] = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert product.flops == 2 * 32**3
    assert product.input_shapes[:2] == [[32, 32], [32, 32]]
    assert any(event.self_cpu_memory_usage > 0 for event in profiler.key_averages())


def test_a_loop_shorter_than_its_schedule(tmp_path: Path) -> None:
    kwargs = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with (
        pytest.warns(UserWarning, match="nothing was recorded"),
        Accelerator(cpu=True).profile(kwargs) as profiler,
    ):
        profiler.step()
    assert not list(tmp_path.iterdir())


def traced(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
        work()
    # Every trace is there once the block is over on any process.
    assert len(list(Path(folder).iterdir())) == accelerator.num_processes


def test_each_rank_writes_a_trace(tmp_path: Path) -> None:
    run_world(traced, 2, str(tmp_path / "a" / "b"))
    for rank in range(2):
        trace = json.loads((tmp_path / "a" / "b" / f"profile_{rank}.json").read_text())
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_unknown_activity() -> None:
    with (
        pytest.raises(ValueError, match="does not know the activity 'gpu'"),
        Accelerator(cpu=True).profile(
            ProfileKwargs(activities=["gpu"])  # type: ignore[list-item]
        ),
    ):
        pass
