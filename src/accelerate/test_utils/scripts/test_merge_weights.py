"""Checks that the shards of an FSDP checkpoint, merged, are the weights of the model: as a function and as a command.

`accelerate launch --num_processes 2 test_merge_weights.py`; it needs at least two processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.checkpoint.merge import merge_fsdp_weights
from accelerate.comm import ops
from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.config.environment import patch_environment
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.strategies.fsdp_files import save_fsdp_model
from accelerate.test_utils.checks import expect, needs, run_checks, shared_folder
from accelerate.test_utils.training import RegressionDataset

SHARDS = "pytorch_model_fsdp_0"

parser = merge_command_parser()


class TinyModel(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = torch.nn.Linear(16, 16)
        self.linear2 = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns as many numbers as it gets."""
        return self.linear2(self.linear1(x).relu())


def setup() -> tuple[Any, FullyShardedDataParallelPlugin, Accelerator]:
    """A sharded model, the plugin that says how, and the accelerator."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD", state_dict_type="SHARDED_STATE_DICT")
    model = TinyModel()
    with patch_environment(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"):
        plugin.set_auto_wrap_policy(model)
    accelerator = Accelerator(fsdp_plugin=plugin)
    return accelerator.prepare(model), plugin, accelerator


def mock_training(accelerator: Accelerator, model: Any) -> Any:
    """Trains the model a little, so that its weights are not those that it began with."""
    loader = DataLoader(RegressionDataset(length=128, seed=42), batch_size=16)
    loader, optimizer = accelerator.prepare(loader, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_weights(operation: str, state_1: dict[str, torch.Tensor], state_2: dict[str, torch.Tensor]) -> None:
    """Checks that all tensors of two models are the "same", or that all of them differ ("diff")."""
    for (name, first), second in zip(state_1.items(), state_2.values(), strict=True):
        same = torch.allclose(first.cpu(), second.cpu())
        expect(same == (operation == "same"), f"{name} is {'the same' if same else 'different'}")


def _whole(accelerator: Accelerator, model: Any) -> TinyModel:
    """The model in one piece, on every process."""
    weights = ops.broadcast_object_list([accelerator.get_state_dict(model)])[0]
    whole = TinyModel()
    whole.load_state_dict(weights)
    return whole


def _check(merged: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    loaded = TinyModel()
    check_weights("diff", loaded.state_dict(), model.state_dict())
    loaded.load_state_dict(merged)
    check_weights("same", loaded.state_dict(), model.state_dict())


def check_safetensors_weights(path: Path, model: torch.nn.Module) -> None:
    """Checks `model.safetensors` in a folder against the model in one piece."""
    _check(load_file(path / "model.safetensors"), model)


def check_pytorch_weights(path: Path, model: torch.nn.Module) -> None:
    """Checks `pytorch_model.bin` in a folder against the model in one piece."""
    _check(torch.load(path / "pytorch_model.bin", weights_only=True), model)


def test_merge_weights_safetensors(model: torch.nn.Module, path: Path) -> None:
    """`merge_fsdp_weights` writes safetensors."""
    merge_fsdp_weights(str(path / SHARDS), str(path / "function"), safe_serialization=True)
    check_safetensors_weights(path / "function", model)


def test_merge_weights_command_safetensors(model: torch.nn.Module, path: Path) -> None:
    """`accelerate merge-weights` writes safetensors."""
    merge_command(parser.parse_args([str(path / SHARDS), str(path / "command")]))
    check_safetensors_weights(path / "command", model)


def test_merge_weights_pytorch(model: torch.nn.Module, path: Path) -> None:
    """`merge_fsdp_weights` writes a file of torch."""
    merge_fsdp_weights(str(path / SHARDS), str(path / "function"), safe_serialization=False)
    check_pytorch_weights(path / "function", model)


def test_merge_weights_command_pytorch(model: torch.nn.Module, path: Path) -> None:
    """`accelerate merge-weights` writes a file of torch."""
    merge_command(parser.parse_args([str(path / SHARDS), str(path / "command"), "--unsafe_serialization"]))
    check_pytorch_weights(path / "command", model)


def test_merge_weights() -> None:
    """Trains and saves a sharded model, and merges what was saved in four ways."""
    needs(PartialState().num_processes > 1, "several processes, because one has no shards")
    model, plugin, accelerator = setup()
    mock_training(accelerator, model)
    with shared_folder() as folder:
        save_fsdp_model(plugin, accelerator, model, folder)
        whole = _whole(accelerator, model)
        run_checks(
            test_merge_weights_safetensors,
            test_merge_weights_command_safetensors,
            test_merge_weights_pytorch,
            test_merge_weights_command_pytorch,
            given=(whole, folder),
        )


def main() -> None:
    """Runs all checks."""
    run_checks(test_merge_weights)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
