"""Train with DeepSpeed: parameters, gradients and optimizer states are spread over the processes (ZeRO stage 3).

Needs:          pip install deepspeed
Two processes:  accelerate launch --config_file examples/configs/deepspeed_zero3.yaml --num_processes 2 \\
                    examples/deepspeed_zero.py
On the CPU:     accelerate launch --cpu --use_deepspeed --zero_stage 3 --num_processes 2 examples/deepspeed_zero.py
Without it:     python examples/deepspeed_zero.py

The loop is the one that you know. DeepSpeed is a matter of the launch, and this script does not even mention it; only
whoever looks at single parameters has to know that they are in pieces.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(epochs=6, batch_size=32, folder="runs/deepspeed"):
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(512, 16)
    dataset = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True).sin())
    model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # DeepSpeed makes one engine of all of these, and wants to know the batch size: so they go to `prepare` together.
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size // accelerator.num_processes, shuffle=True)
    )

    means = []
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        means.append(accelerator.reduce(total / len(loader), "mean").item())
        accelerator.print(f"epoch {epoch}: loss {means[-1]:.4f}")

    # Each process has a piece of every weight. `save_model` puts them together, a few at a time: what it writes loads
    # into the plain model.
    accelerator.save_model(model, folder)
    how = accelerator.distributed_type.value
    accelerator.print(f"{how}, weights in {folder}; loss fell from {means[0]:.4f} to {means[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
