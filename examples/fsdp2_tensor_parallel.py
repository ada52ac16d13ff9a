"""FSDP2 and tensor parallelism together: each layer is split between neighbors, and the pieces are sharded.

Two processes:  accelerate launch --cpu --num_processes 2 examples/fsdp2_tensor_parallel.py
Four, 2 by 2:   accelerate launch --cpu --num_processes 4 examples/fsdp2_tensor_parallel.py
One, as it was: python examples/fsdp2_tensor_parallel.py

Tensor parallelism talks in every layer, so it belongs inside a machine, where GPUs have a fast connection. FSDP talks
once per block and can reach across machines. All of these commands train the same model to the same loss.
"""

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


class Model(nn.Module):
    # The first layer of a block is cut into columns and the second one into rows. A process then computes with its part
    # from one to the other, and they talk once, at the end. Models of transformers come with such a plan.
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_accelerator():
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return Accelerator()
    # Two processes share each layer, and as many pairs as there are share the data. With one pair, nothing is sharded.
    axes = ParallelismConfig(tp_size=2, dp_shard_size=processes // 2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return Accelerator(parallelism_config=axes, fsdp_plugin=plugin if axes.dp_shard_size > 1 else None)


def numbers_here(model):
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def main(epochs=4, batch_size=32):
    accelerator = make_accelerator()
    set_seed(0)
    inputs = torch.randn(512, 32)
    dataset = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True).sin())
    # A pair works on the same batch, so the batch is divided by the number of pairs.
    pairs = max(1, accelerator.num_processes // 2)
    model = Model()
    everything = numbers_here(model)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(dataset, batch_size // pairs)
    )
    accelerator.print(f"{numbers_here(model)} of {everything} parameters are on process 0")

    means = []
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        means.append(accelerator.reduce(total / len(loader), "mean").item())
        accelerator.print(f"epoch {epoch}: loss {means[-1]:.4f}")

    accelerator.print(f"loss fell from {means[0]:.4f} to {means[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
