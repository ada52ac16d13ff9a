"""Several processes with a device each: what they promise each other, and that they train as one.

What goes from chip to chip goes over gloo here (see `fakes.py`): torch_xla has no such collectives on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DistributedType
from accelerate.comm import current
from accelerate.comm.xla import XLACommunicator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    ParallelismConfig,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
    synchronize_rng_states,
)
from tests.contract.test_communicator import PROMISES
from tests.unit.accelerator.toys import Net, data, weights
from tests.xla.worlds import on_several, on_xla


def keeps_its_promises() -> None:
    state = PartialState()
    communicator = current()
    assert isinstance(communicator, XLACommunicator) and communicator.size == state.num_processes == 2
    assert state.distributed_type == DistributedType.XLA and state.backend == "xla" and state.device.type == "xla"
    for promise in PROMISES:
        promise(communicator)


def test_the_promises_of_every_communicator() -> None:
    on_several(keeps_its_promises)


def talks() -> None:
    state = PartialState()
    rank, device = state.process_index, state.device
    mine = torch.tensor([[float(rank), 1.0]], device=device)

    def same(tensor: torch.Tensor, expected: Any) -> None:
        assert tensor.device.type == "xla" and tensor.tolist() == expected, (tensor, expected)

    same(gather(mine), [[0.0, 1.0], [1.0, 1.0]])
    same(gather(torch.full((rank + 1,), rank, device=device)), [0, 1, 1])
    same(gather(torch.tensor([rank == 0], device=device)), [True, False])
    same(gather({"a": torch.tensor(rank, device=device)})["a"], [0, 1])
    same(gather(torch.zeros((0, 3), device=device)), [])
    same(reduce(mine, "sum"), [[1.0, 2.0]])
    same(reduce(mine, "mean"), [[0.5, 1.0]])
    same(broadcast(mine.clone(), 1), [[1.0, 1.0]])
    spoilt = torch.tensor([float("nan") if rank == 0 else 3.0], device=device)
    same(broadcast(spoilt, 1), [3.0])  # whatever the others had
    padded = pad_across_processes(torch.ones(rank + 1, 2, device=device), pad_index=-1)
    same(padded[-1], [-1.0, -1.0] if rank == 0 else [1.0, 1.0])
    assert gather_object([rank, "x"]) == [0, "x", 1, "x"]
    assert broadcast_object_list([rank, {"a": rank}], 1) == [1, {"a": 1}]
    half = reduce(torch.ones(2, device=device, dtype=torch.bfloat16), "sum")
    assert half.dtype is torch.bfloat16 and half.tolist() == [2.0, 2.0]

    set_seed(rank)
    synchronize_rng_states(["xla", "torch"])
    same(gather(torch.rand(1, device=device)).unique().numel() * torch.ones(1, device=device), [1.0])
    set_seed(7, device_specific=True)
    assert gather(torch.rand(1, device=device)).unique().numel() == 2


def test_what_they_tell_each_other() -> None:
    on_several(talks)


def _batches(processes: int) -> Any:
    """The same global batches for one process as for several."""
    return torch.utils.data.DataLoader(data(32), batch_size=8 // processes)


def _trained(accelerator: Accelerator, epochs: int = 2, **more: Any) -> tuple[Any, ...]:
    # Weights that differ, and those of the first process count.
    plain = Net(seed=accelerator.process_index)
    parts = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.05), _batches(accelerator.num_processes)
    )
    _train(accelerator, parts, epochs, **more)
    return parts


def _train(accelerator: Accelerator, parts: tuple[Any, ...], epochs: int, clip: float | None = None) -> None:
    model, optimizer, batches = parts
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                    assert accelerator.gradient_state.is_xla_gradients_synced == (accelerator.num_processes > 1)
                optimizer.step()
                optimizer.zero_grad()


def trains(accumulation: int, clip: float | None) -> torch.Tensor:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, _, _ = _trained(accelerator, clip=clip)
    assert not accelerator.gradient_state.is_xla_gradients_synced
    return weights(model).detach().cpu()


def trains_by_hand() -> torch.Tensor:
    """Sums over items, a closure, gradients clipped to values."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    plain = Net(seed=accelerator.process_index)
    model, optimizer, batches = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05), _batches(accelerator.num_processes)
    )
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            accelerator.backward(loss, num_items=len(x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    for x, y in batches:

        def closure(x: Any = x, y: Any = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return weights(model).detach().cpu()


def train_all() -> list[torch.Tensor]:
    results = []
    for attempt in (lambda: trains(1, None), lambda: trains(2, 0.3), trains_by_hand):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        results.append(attempt())
    return results


def test_several_train_as_one() -> None:
    first, second = on_several(train_all)
    alone = on_xla(train_all)
    for here, there, expected in zip(first, second, alone, strict=True):
        assert torch.equal(here, there)
        torch.testing.assert_close(here, expected, rtol=0, atol=1e-5)


def saves_and_resumes(folder: str) -> torch.Tensor:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(exact_resume=True))
    parts = _trained(accelerator, epochs=1)
    for name, behind in (("now", False), ("behind", True)):
        accelerator.save_state(f"{folder}/{name}", async_save=behind)
    accelerator.wait_for_checkpoint()
    mine = torch.rand(2, device=accelerator.device).cpu()
    _train(accelerator, parts, epochs=1)
    end = weights(parts[0]).detach().cpu()
    for name in ("now", "behind"):
        accelerator.load_state(f"{folder}/{name}")
        assert torch.equal(torch.rand(2, device=accelerator.device).cpu(), mine), name
        _train(accelerator, parts, epochs=1)
        assert torch.equal(weights(parts[0]).detach().cpu(), end), name
    accelerator.save_model(parts[0], f"{folder}/model")
    accelerator.save(parts[0].state_dict(), f"{folder}/weights.bin")
    accelerator.wait_for_everyone()
    return end


def test_several_save_and_resume_together(tmp_path: Path) -> None:
    first, second = on_several(saves_and_resumes, str(tmp_path))
    assert torch.equal(first, second)
    saved = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), first)
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert sorted(path.name for path in (tmp_path / "now").glob("random_states_*")) == [
        "random_states_0.pkl",
        "random_states_1.pkl",
    ]


def evaluates() -> tuple[list[float], list[float]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    seen: list[float] = []
    batches = accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.arange(11.0), batch_size=3))
    for batch in batches:
        assert batch.device.type == "xla"
        seen += accelerator.gather_for_metrics(batch).tolist()
    accelerator.dataloader_config.dispatch_batches = None
    more: list[float] = []
    for batch in accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.arange(11.0), batch_size=3)):
        more += accelerator.gather_for_metrics(batch).tolist()
    return sorted(seen), sorted(more)


def test_every_sample_is_counted_once() -> None:
    for found in on_several(evaluates):
        assert found == (list(map(float, range(11))),) * 2


def refuses_another_number() -> None:
    import torch_xla.runtime as xr

    xr.world_size = lambda: 4
    with pytest.raises(ValueError, match="one of 2 processes, but torch_xla finds 4 devices"):
        PartialState()
    xr.world_size, xr.addressable_device_count = (lambda: 2), (lambda: 2)
    with pytest.raises(ValueError, match="has 2 cores, as on TPU v2 and v3"):
        PartialState()
    xr.addressable_device_count = lambda: 1
    with pytest.raises(ValueError, match="does not run on an XLA device"):
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2))


def test_a_world_that_does_not_fit_is_refused() -> None:
    on_several(refuses_another_number)
