"""Train a model whose parameters, gradients and optimizer state are spread over all processes.

Two processes:  accelerate launch --cpu --num_processes 2 examples/sharding.py
Four, as two copies of two shards:
                accelerate launch --cpu --num_processes 4 examples/sharding.py --copies 2
Two, which share each layer, or four, where pairs do so:
                accelerate launch --cpu --num_processes 2 examples/sharding.py --split 2
                accelerate launch --cpu --num_processes 4 examples/sharding.py --split 2
With FullyShardedDataParallel instead of fully_shard:
                accelerate launch --cpu --num_processes 2 examples/sharding.py --version 1
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import set_seed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    # How layers are split, where there is an axis for that.
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_accelerator(version, copies, split):
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    shards = processes // copies // split
    axes = None
    if copies > 1 or split > 1:
        axes = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards, tp_size=split)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    return Accelerator(fsdp_plugin=plugin if shards > 1 else None, parallelism_config=axes)


def held(model):
    """How many numbers of a model's parameters lie on this process."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def train(version=2, copies=1, split=1, epochs=4, batch_size=16, save=None):
    accelerator = make_accelerator(version, copies, split)
    set_seed(0)
    x = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch_size)
    model = Tower(32, 3)
    everything = held(model)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    accelerator.print(f"{accelerator.distributed_type}: rank 0 holds {held(model)} of {everything} parameters")

    loss = float("nan")
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            step_loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(step_loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += step_loss.detach()
        loss = accelerator.reduce(total / len(loader), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}")
    if save:
        accelerator.save_state(save)
    accelerator.end_training()
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", type=int, default=2, choices=[1, 2], help="of FSDP")
    parser.add_argument("--copies", type=int, default=1, help="of the model, each shared by several processes")
    parser.add_argument("--split", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16, help="per process")
    parser.add_argument("--save", help="a folder for a checkpoint at the end")
    train(**vars(parser.parse_args()))
