"""Device meshes on real processes: copies of shards, split layers, cut sequences, and who gets which data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.errors import NotYetSupported
from accelerate.parallel.shards import local, whole
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, TorchTensorParallelConfig, TorchTensorParallelPlugin
from tests.harness import run_world
from tests.world.towers import Tower, loss_of, micro_batches, tokens_of, trains_as_one_process

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def _plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )


def _trains_as_one_process(sizes: dict[str, int], held: float, fsdp: bool = True, steps: int = 20) -> None:
    config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin() if fsdp else None, parallelism_config=config)
    plain = Tower(seed=accelerator.process_index)
    whole_size = sum(p.numel() for block in plain.blocks for p in (block.up.weight, block.down.weight))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    here = sum(local(p).numel() for block in model.blocks for p in (block.up.weight, block.down.weight))
    assert here == whole_size * held
    trains_as_one_process(
        accelerator, model, optimizer, steps, accelerator.data_parallel_rank, config.data_parallel_size
    )


def test_copies_of_shards() -> None:
    run_world(_trains_as_one_process, 4, {"dp_replicate_size": 2, "dp_shard_size": 2}, 0.5)


def test_split_layers() -> None:
    run_world(_trains_as_one_process, 2, {"tp_size": 2}, 0.5, False)


def test_split_layers_of_shards() -> None:
    run_world(_trains_as_one_process, 4, {"dp_shard_size": 2, "tp_size": 2}, 0.25)


class Sequences(nn.Module):
    tp_plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": "sequence",
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.embed(tokens)))))


def _split_sequences(arrives: bool) -> None:
    """Norms along the sequence, whose gradients have to be added up; split by us, or before we see it."""
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.parallelism_config.tp_size == 2 and accelerator.tensor_parallel_rank == accelerator.process_index
    plain, alone = Sequences(), Sequences()
    if arrives:
        styles = {**Sequences.tp_plan, "norm": SequenceParallel()}
        styles["down"] = RowwiseParallel()
        pairs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "alone"))
        with pytest.raises(ValueError, match="came split over 1 processes, but tp_size is 2"):
            accelerator.prepare(parallelize_module(Sequences(), pairs["alone"], styles))
        parallelize_module(plain, init_device_mesh("cpu", (2,)), styles)  # a mesh without names, as loaders have it
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(4):
        tokens = tokens_of(step, 0, 1)
        accelerator.backward(model(tokens).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        alone(tokens).square().mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.5), rtol=1e-4, atol=1e-6)
        reference.step()
        reference.zero_grad()
    assert isinstance(model.norm.weight, DTensor)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arrives", [False, True])
def test_split_sequences(arrives: bool) -> None:
    run_world(_split_sequences, 2, arrives)


def _checkpoint(folder: str) -> None:
    config = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2  # which an axis asks for
    plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    def train(steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = loss_of(model, tokens_of(step, accelerator.data_parallel_rank, 2))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    train(range(2))
    accelerator.save_state(folder)
    expected = train(range(2, 4))
    accelerator.load_state(folder)
    assert train(range(2, 4)) == expected


def test_checkpoint(tmp_path: Any) -> None:
    run_world(_checkpoint, 4, str(tmp_path / "checkpoint"))


def _window(folder: str, sizes: dict[str, int], save: bool) -> list[float]:
    """Saved two micro-batches into a window of three."""
    config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=3)
    plain = Tower(seed=0 if save else 7)
    plain.shift = Tower().shift  # which is not saved
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    def train(steps: range) -> list[float]:
        return micro_batches(
            accelerator, model, optimizer, steps, accelerator.data_parallel_rank, config.data_parallel_size
        )

    if save:
        train(range(5))
        accelerator.save_state(folder)
        expected = train(range(5, 10))
        accelerator.load_state(folder)
        again = train(range(5, 10))
        assert again == pytest.approx(expected, abs=1e-6)
        return expected
    accelerator.load_state(folder)
    return train(range(5, 10))


def test_in_the_middle_of_a_window(tmp_path: Any) -> None:
    alone, shards = {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}
    ways = [("alone", alone, 2), ("shards", shards, 4)]
    expected = {name: run_world(_window, ranks, str(tmp_path / name), sizes, True)[0] for name, sizes, ranks in ways}
    assert expected["alone"] == pytest.approx(expected["shards"], abs=1e-5)
    ways += [("copies", {"dp_shard_size": 2}, 2)]
    for saved in expected:
        for _, sizes, ranks in ways:
            found = run_world(_window, ranks, str(tmp_path / saved), sizes, False)[0]
            assert found == pytest.approx(expected[saved], abs=1e-5), (saved, sizes)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(22.0))


KINDS = ["plain", "shuffled", "dispatched", "stream"]


def _data(axis: str) -> list[tuple[list[float], list[float]]]:
    return [_data_of(kind, axis) for kind in KINDS]


def _data_of(kind: str, axis: str) -> tuple[list[float], list[float]]:
    AcceleratorState._reset_state()
    config = ParallelismConfig(dp_shard_size=2, **{axis: 2})
    loading = DataLoaderConfiguration(dispatch_batches=kind == "dispatched" or None, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, parallelism_config=config, dataloader_config=loading)
    data: Any = Stream() if kind == "stream" else TensorDataset(torch.arange(22.0))
    torch.manual_seed(3)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=kind == "shuffled"))
    assert loader.total_batch_size == 8
    seen: list[float] = []
    gathered: list[float] = []
    for batch in loader:
        values = batch if kind == "stream" else batch[0]
        seen += values.tolist()
        gathered += accelerator.gather_for_metrics(values).tolist()
        named = [f"sample {value}" for value in values.tolist()]
        assert len(set(accelerator.gather_for_metrics(named))) == len(accelerator.gather_for_metrics(named)) in (6, 8)
        both = accelerator.gather_for_metrics({"values": values, "named": named})
        assert len(both["named"]) == len(set(both["named"])) == len(both["values"])
    # One for each part of the data, and for each part of the sequences.
    scalars = accelerator.gather_for_metrics(torch.tensor(float(accelerator.process_index)))
    assert scalars.tolist() == ([0.0, 2.0] if axis == "tp_size" else [0.0, 1.0, 2.0, 3.0])
    return seen, gathered


@pytest.mark.parametrize("axis", ["tp_size", "cp_size"])
def test_data_once_per_group(axis: str) -> None:
    for kind, *results in zip(KINDS, *run_world(_data, 4, axis), strict=True):
        seen = [seen for seen, _ in results]
        assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2], kind
        assert set(seen[0]) | set(seen[2]) == {float(number) for number in range(22)}, kind
        for _, gathered in results:
            assert sorted(gathered) == [float(number) for number in range(22)], kind


def _scheduler_and_objects() -> None:
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    plain = Tower()
    inner = torch.optim.SGD(plain.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: float(step))
    model, optimizer, scheduler = accelerator.prepare(plain, inner, schedule)
    for step in range(3):
        accelerator.backward(loss_of(model, tokens_of(step, 0, 1)) * 1e-3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    # One process of data: one step each time.
    assert scheduler.get_last_lr() == [3.0]
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert accelerator.gather_for_metrics(torch.tensor(2.0)).tolist() == [2.0]
    assert accelerator.gather(torch.tensor([1.0])).tolist() == [1.0, 1.0]


def test_scheduler_and_objects() -> None:
    run_world(_scheduler_and_objects, 2)


def _sequences(strategy: str) -> None:
    from accelerate.utils import TorchContextParallelConfig

    handler = TorchContextParallelConfig(cp_comm_strategy=strategy)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, cp_handler=handler))
    assert accelerator.is_fsdp2 and accelerator.context_parallel_rank == accelerator.process_index
    assert accelerator.data_parallel_rank == 0 and accelerator.data_parallel_shard_rank == 0
    model = accelerator.prepare(Tower())
    held = sum(local(p).numel() for p in model.parameters())
    assert held == sum(p.numel() for p in Tower().parameters()) / 2
    tokens = torch.arange(16).reshape(2, 8)
    labels = torch.arange(16).reshape(2, 8) + 100
    kept = labels.clone()
    with accelerator.maybe_context_parallel(
        buffers=[tokens, labels], buffer_seq_dims=[1, 1], no_restore_buffers={labels}
    ):
        # The first and the last quarter, or the two in the middle.
        columns = [0, 1, 6, 7] if accelerator.process_index == 0 else [2, 3, 4, 5]
        assert tokens.tolist() == torch.arange(16).reshape(2, 8)[:, columns].tolist()
        assert labels.tolist() == kept[:, columns].tolist()
    assert tokens.tolist() == torch.arange(16).reshape(2, 8).tolist()
    with pytest.raises(ValueError, match="pad it to a multiple of 4"):
        with accelerator.maybe_context_parallel(buffers=[torch.ones(1, 6)], buffer_seq_dims=[1]):
            pass
    with pytest.raises(ValueError, match="2 buffers and 1 buffer_seq_dims"):
        with accelerator.maybe_context_parallel(buffers=[tokens, labels], buffer_seq_dims=[1]):
            pass


@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
def test_sequences(strategy: str) -> None:
    run_world(_sequences, 2, strategy)


def _without_an_axis() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is None and accelerator.torch_device_mesh is None
    tokens = torch.ones(1, 3)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.shape == (1, 3)
    with pytest.raises(RuntimeError, match="no device mesh"):
        accelerator.tensor_parallel_rank  # noqa: B018
    with pytest.raises(NotYetSupported):
        accelerator.pipeline_parallel_rank  # noqa: B018


def test_without_an_axis() -> None:
    run_world(_without_an_axis, 2)


def _from_the_launcher() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config.dp_replicate_size == 2
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert accelerator.state.fsdp_plugin.fsdp_version == 2


def test_from_the_launcher() -> None:
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
    run_world(_from_the_launcher, 4, env=variables | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"})


def _refuses(sizes: dict[str, int], plugin: int | None, plan: dict[str, str] | None) -> str:
    config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=plan))
    fsdp = None if plugin is None else FullyShardedDataParallelPlugin(fsdp_version=plugin)
    with pytest.raises(ValueError) as caught:
        Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=fsdp).prepare(Tower())
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "plugin", "plan", "text"),
    [
        ({"dp_shard_size": 4}, None, None, "is for 4 processes (dp_shard_size=4), but there are 2"),
        ({"dp_shard_size": 2}, 1, None, "needs FSDP version 2"),
        ({"tp_size": 2}, None, None, "needs to know how to split this Tower"),
        ({"tp_size": 2}, None, {"nobody": "colwise"}, "names nobody"),
        ({"tp_size": 2}, None, {"head": "sideways"}, "by 'sideways'"),
        ({"dp_replicate_size": 2}, 2, None, "no axis to shard over"),
    ],
)
def test_refuses(sizes: dict[str, int], plugin: int | None, plan: Any, text: str) -> None:
    for message in run_world(_refuses, 2, sizes, plugin, plan):
        assert text in message
