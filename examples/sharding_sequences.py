"""Train on sequences that several processes share, each working on a part of every one (context parallelism).

Two processes:  accelerate launch --cpu --num_processes 2 examples/sharding_sequences.py
Four, as two pairs with different data:
                accelerate launch --cpu --num_processes 4 examples/sharding_sequences.py

Inside `maybe_context_parallel` the buffers hold this process's part, and attention (`scaled_dot_product_attention`)
looks at all parts. torch can do the latter on GPUs only, so this model looks at one token at a time and runs anywhere.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import TorchContextParallelConfig, set_seed


class Guesser(nn.Module):
    """The loss of guessing what comes after each token."""

    def __init__(self, words):
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, words))

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.layers(self.embed(tokens)).flatten(0, 1), targets.flatten())


def make_accelerator(parts, travel):
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return Accelerator()
    axes = ParallelismConfig(
        cp_size=parts,
        dp_shard_size=processes // parts,
        cp_handler=TorchContextParallelConfig(cp_comm_strategy=travel),
    )
    # Parameters are sharded over all processes, whether they share data or sequences.
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    return Accelerator(fsdp_plugin=plugin, parallelism_config=axes)


def train(parts=2, travel="allgather", epochs=3, batch_size=8, length=64):
    accelerator = make_accelerator(parts, travel)
    set_seed(0)
    tokens = torch.randint(0, 32, (64, length + 1))
    for place in range(length):
        tokens[:, place + 1] = (5 * tokens[:, place] + 3) % 32  # what comes next can be learned
    # Shifted before they are cut: the next token may be in the part of another process.
    loader = DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), batch_size=batch_size)
    model = Guesser(32)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)

    loss = float("nan")
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            buffers = [inputs, targets]
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
            ):
                if epoch == 0:
                    here = inputs.shape[1]
                step_loss = model(inputs, targets)
                accelerator.backward(step_loss)
                optimizer.step()
                optimizer.zero_grad()
            total += step_loss.detach()
        # The loss of this process is that of its parts, so the mean is over all processes.
        loss = accelerator.reduce(total / len(loader), "mean").item()
        accelerator.print(f"epoch {epoch}: {here} of {length} tokens here, loss {loss:.4f}")
    accelerator.end_training()
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=2, help="processes that share each sequence")
    parser.add_argument("--travel", default="allgather", choices=["allgather", "alltoall"], help="of keys and values")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="per group of processes that share sequences")
    train(**vars(parser.parse_args()))
