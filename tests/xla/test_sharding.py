"""FSDP by SPMD over four devices, which XLA really spreads its programs over, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedType
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from tests.xla.worlds import on_host, on_several, on_xla

DEVICES = {"CPU_NUM_DEVICES": "4"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Tied(nn.Module):
    """Blocks between an embedding and a head that are one weight; 10 is not a multiple of the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(hidden)}


def _parts(accelerator: Accelerator) -> tuple[Any, ...]:
    set_seed(0)
    model = Tied()
    tokens = torch.randint(0, 10, (34,))
    batches = DataLoader(TensorDataset(tokens, (tokens * 3) % 10), batch_size=8, shuffle=True)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), batches)


def _train(accelerator: Accelerator, parts: tuple[Any, ...], epochs: int) -> list[float]:
    model, optimizer, batches = parts
    losses = []
    for _ in range(epochs):
        for tokens, wanted in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens)["logits"], wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


def _cuts(tensors: dict[str, torch.Tensor]) -> dict[str, int | None]:
    from accelerate.torch_internals.xla import cut_along

    return {name: cut_along(tensor) for name, tensor in tensors.items()}


def _plain() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    return _train(accelerator, _parts(accelerator), epochs=3)


def shards(folder: str) -> list[float]:
    import torch_xla.debug.metrics as metrics
    import torch_xla.runtime as xr

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.transformer_cls_names_to_wrap = ["Block"]
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.XLA and accelerator.num_processes == 1
    assert xr.is_spmd() and xr.global_runtime_device_count() == 4
    model, optimizer, batches = parts = _parts(accelerator)
    assert type(model) is Tied and model.head.weight is model.embed.weight
    expected = {"embed.weight": 1, "blocks.0.inner.weight": 0, "blocks.0.outer.weight": 1, "blocks.0.inner.bias": 0}
    before = _cuts(dict(model.named_parameters()))
    assert before.items() >= expected.items()

    losses = _train(accelerator, parts, epochs=1)
    compiled = int(metrics.metric_data("CompileTime")[0])
    losses += _train(accelerator, parts, epochs=2)
    assert int(metrics.metric_data("CompileTime")[0]) - compiled <= 2

    assert _cuts(dict(model.named_parameters())) == before  # also after steps
    states = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    assert _cuts(states) == before

    accelerator.save_state(f"{folder}/state")
    more = _train(accelerator, parts, epochs=1)
    accelerator.load_state(f"{folder}/state")
    assert _cuts(dict(model.named_parameters())) == before
    assert _cuts({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}) == before
    whole = accelerator.get_state_dict(model)
    assert whole.keys() == Tied().state_dict().keys() and whole["embed.weight"].shape == (10, 8)
    assert all(value.device.type == "cpu" for value in whole.values())
    accelerator.save_model(model, f"{folder}/model")
    assert len(more) == 5
    tokens, _ = next(iter(batches))
    assert _cuts({"tokens": tokens}) == {"tokens": 0}
    return losses


def test_a_sharded_model_trains_as_a_whole_one(tmp_path: Path) -> None:
    losses = on_xla(shards, str(tmp_path), **DEVICES)
    assert losses == pytest.approx(on_host(_plain), abs=1e-4)
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "state" / "model.safetensors").exists() and (tmp_path / "model" / "model.safetensors").exists()


def shards_otherwise() -> None:
    """Settings as they come from a launch, in bf16, with blocks that compute twice."""
    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.state.fsdp_plugin.xla_fsdp_grad_ckpt
    model, *_ = parts = _parts(accelerator)
    assert set(_cuts(dict(model.named_parameters())).values()) == {0, None}
    assert _cuts(dict(model.blocks[1].named_parameters())) == dict.fromkeys(model.blocks[1].state_dict(), None)
    calls: list[int] = []
    model.blocks[0].inner.register_forward_hook(lambda *_: calls.append(1))
    losses = _train(accelerator, parts, epochs=4)
    assert losses[-1] < losses[0] / 2 and len(calls) == 2 * len(losses)


def test_settings_of_a_launch() -> None:
    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_IGNORED_MODULES": "blocks.1",
        "FSDP_XLA_FSDP_SETTINGS": '{"shard_param_on_dim_0": true}',
        "FSDP_XLA_FSDP_GRAD_CKPT": "true",
    }
    on_xla(shards_otherwise, **DEVICES, **settings)


def refuses() -> None:
    with pytest.raises(ValueError, match="uses one process for all chips of one machine, but there are 2 processes"):
        PartialState()
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_several_processes_do_not_shard() -> None:
    on_several(refuses)


def comes_too_late() -> None:
    assert PartialState().device.type == "xla"  # which takes one device for itself
    with pytest.raises(ValueError, match="was in use before FSDP was set up"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_a_device_that_is_in_use_is_not_sharded_over() -> None:
    on_xla(comes_too_late, **DEVICES)


def trains_with_a_trainer(folder: str) -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    set_seed(0)
    net = GPT2LMHeadModel(config)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(1, 64, (32, 12))]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1, report_to=[], optim="adamw_torch"
    )
    trainer = Trainer(net, arguments, train_dataset=texts)
    trainer.train()
    if trainer.accelerator.device.type == "xla":
        assert set(_cuts(dict(trainer.model.named_parameters())).values()) == {0, 1}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_of_transformers_with_the_settings_of_a_launch(tmp_path: Path) -> None:
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    losses = on_xla(trains_with_a_trainer, str(tmp_path / "xla"), **DEVICES, **settings)
    assert losses == pytest.approx(on_host(trains_with_a_trainer, str(tmp_path / "host")), abs=1e-3)
    assert (tmp_path / "xla" / "checkpoint-4" / "model.safetensors").exists()
