"""What clients read from an Accelerator, and the methods that are not part of a step."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate import Accelerator
from accelerate.checkpointing import verify_checkpoint
from accelerate.state import GradientState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    ProfileKwargs,
    ProjectConfiguration,
    patch_environment,
)
from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE, Net, loader


def test_properties_on_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type is DistributedType.NO
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process and accelerator.is_local_main_process and accelerator.is_last_process
    assert not accelerator.use_distributed and not accelerator.multi_device
    assert accelerator.mixed_precision == "no" and accelerator.scaler is None and accelerator.native_amp is False
    assert accelerator.sync_gradients is True and accelerator.gradient_accumulation_steps == 1
    assert accelerator.trackers == [] and accelerator.save_iteration == 0
    assert accelerator.deepspeed_plugin is None and getattr(accelerator.state, "fsdp_plugin", None) is None
    assert accelerator.is_fsdp2 is False and accelerator.should_save_model is True
    assert accelerator.optimizer_step_was_skipped is False
    assert accelerator.gradient_state.plugin_kwargs.get("num_steps") == 1
    assert accelerator._models == []
    assert accelerator.rng_types == ["generator"]


def test_settings_are_read_where_they_are_used() -> None:
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=config)
    assert accelerator.split_batches and accelerator.dispatch_batches is False and accelerator.even_batches
    assert accelerator.use_seedable_sampler and not accelerator.non_blocking
    accelerator.dataloader_config.dispatch_batches = None
    accelerator.even_batches = False
    assert accelerator.dispatch_batches is None and config.even_batches is False
    accelerator.sync_gradients = False
    assert GradientState().sync_gradients is False


def test_project_folders(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    assert Path(accelerator.project_dir) == Path(accelerator.logging_dir) == tmp_path
    configured = Accelerator(project_config=ProjectConfiguration(project_dir="a", logging_dir="b"))
    assert (configured.project_dir, configured.logging_dir) == ("a", "b")


@pytest.mark.parametrize(
    ("handlers", "sentence"),
    [
        ([AutocastKwargs(), AutocastKwargs()], "two AutocastKwargs"),
        ([object()], "cannot contain an object"),
        ([AutocastKwargs], r"the class AutocastKwargs: pass `AutocastKwargs\(\.\.\.\)`"),
    ],
)
def test_wrong_handlers(handlers: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Accelerator(kwargs_handlers=handlers)


def test_it_ends_when_it_is_dropped() -> None:
    """And its loaders with it: workers that wait for the garbage collection make that wait for them.

    Nor do models and optimizers wait for it, whose memory the next ones need.
    """
    torch.optim.SGD(Net().parameters())  # the first one of a process leaves frames behind
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(cpu=True)
        model = Net()
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        for x, _ in batches:
            accelerator.backward(model(x).sum(), num_items=len(x))
            optimizer.step()
            optimizer.zero_grad()
        ended = weakref.ref(accelerator), weakref.ref(batches)
        del accelerator, batches
        assert [reference() for reference in ended] == [None, None]
        ended = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [reference() for reference in ended] == [None, None]
    finally:
        gc.enable()


def test_save(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    state = accelerator.get_state_dict(model)
    accelerator.save(state, tmp_path / "model.pt")
    accelerator.save(state, str(tmp_path / "model.safetensors"), safe_serialization=True)
    for saved in (torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")):
        torch.testing.assert_close(dict(saved), dict(state))
    with pytest.raises(Exception, match="pickle"):
        accelerator.save({"a": lambda: None}, tmp_path / "model.pt")
    # What was there is still whole, and nothing else is left behind.
    assert set(torch.load(tmp_path / "model.pt")) == set(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]


def test_verify_device_map() -> None:
    accelerator = Accelerator()
    model = Net()
    assert accelerator.verify_device_map(model) is False
    model.hf_device_map = {"": 0}
    assert accelerator.verify_device_map(model) is False
    model.first.hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model) is True


def test_a_loader_prepared_twice_is_said_once_and_kept() -> None:
    accelerator = Accelerator()
    batches = accelerator.prepare(loader())
    with pytest.warns(UserWarning, match="prepared before") as caught:
        assert accelerator.prepare(batches) is batches
    assert len(caught) == 1 and caught[0].filename == __file__
    assert len(accelerator._dataloaders) == 1


def _world(folder: str) -> None:
    accelerator = Accelerator()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    assert accelerator.use_distributed and not accelerator.multi_device
    assert accelerator.is_main_process == (rank == 0) and accelerator.is_last_process == (rank == ranks - 1)

    assert accelerator.check_trigger() is False
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() is True
    assert accelerator.check_trigger() is False

    accelerator.print(f"said by {rank}")
    accelerator.wait_for_everyone()
    accelerator.save({"rank": torch.tensor(rank)}, Path(folder) / "saved.pt")
    accelerator.wait_for_everyone()
    assert torch.load(Path(folder) / "saved.pt")["rank"] == 0

    spread = Net()
    spread.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ValueError, match=f"cannot also be trained on {ranks} processes"):
        accelerator.prepare(spread)
    with patch_environment(accelerate_bypass_device_map="true"):
        assert accelerator.unwrap_model(accelerator.prepare(spread)) is spread

    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any("mm" in event.key for event in profiler.key_averages())
    for other in range(ranks):
        trace = json.loads((Path(folder) / f"profile_{other}.json").read_text())
        assert trace["traceEvents"]

    accelerator.end_training()
    assert not torch.distributed.is_initialized()


def test_several_processes(tmp_path: Path) -> None:
    run_world(_world, 2, str(tmp_path))


def test_profile_with_a_schedule(tmp_path: Path) -> None:
    run_world(_schedule, 1, str(tmp_path), env=ALONE)


def _schedule(folder: str) -> None:
    accelerator = Accelerator(
        kwargs_handlers=[
            ProfileKwargs(
                activities=["cpu"],
                schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
                on_trace_ready=lambda profiler: seen.append(profiler.step_num),
            )
        ]
    )
    seen: list[int] = []
    with accelerator.profile() as profiler:
        for _ in range(4):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    assert seen == [3]
    assert not list(Path(folder).iterdir())


def test_the_end_of_training_on_one_process_waits_for_the_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.prepare(Net())
    accelerator.save_state(tmp_path / "x", async_save=True)
    accelerator.end_training()
    assert verify_checkpoint(tmp_path / "x")["world_size"] == 1
    accelerator.end_training()  # nothing is left to end
    assert accelerator.gather(torch.ones(1)).tolist() == [1.0]
