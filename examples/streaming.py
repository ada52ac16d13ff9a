"""Train on a stream: data that is too big to hold, has no length, and can be read only once, from front to back.

One process:    python examples/streaming.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/streaming.py

Only the main process reads. It hands every process its part of each batch, so nothing is read twice, and no process has
to know which lines are its own. (Where reading is the bottleneck, let every process open different files instead, and
pass `DataLoaderConfiguration(dispatch_batches=False)`, with which each reads for itself.)
"""

import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

DIGITS = "0123456789+="


class Sums(IterableDataset):
    """Lines such as `17+25=42`: the sum without its last digit goes in, the last digit is to be guessed."""

    def __init__(self, path, shuffle_buffer=256):
        self.path = path
        self.shuffle_buffer = shuffle_buffer
        self.lines_read = 0

    def __iter__(self):
        # The order of a stream is that of its source. A buffer from which lines are taken at random mixes neighbors.
        draw, buffer = random.Random(0), []
        with self.path.open() as file:
            for line in file:
                self.lines_read += 1
                buffer.append(self.encode(line.strip()))
                if len(buffer) == self.shuffle_buffer:
                    yield buffer.pop(draw.randrange(len(buffer)))
        draw.shuffle(buffer)
        yield from buffer

    @staticmethod
    def encode(line):
        characters = torch.tensor([DIGITS.index(character) for character in line])
        return characters[:-1], characters[-1]


def write_sums(path, count):
    """The stand-in for a bucket full of logs."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(10), draw.randrange(10)
            file.write(f"{a}+{b}={a + b:02d}\n")


class Guesser(nn.Module):
    def __init__(self, length, width=32):
        super().__init__()
        self.embed = nn.Embedding(len(DIGITS), width)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(length * width, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, characters):
        return self.layers(self.embed(characters))


def main(lines=16_000, batch_size=64, folder="runs/streaming"):
    accelerator = Accelerator()
    set_seed(0)
    path = Path(folder, "sums.txt")
    if accelerator.is_main_process:
        write_sums(path, lines)

    stream = Sums(path)
    model = Guesser(length=len("1+2=0"))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(stream, batch_size // accelerator.num_processes),
    )

    # There is no `len(loader)`, so progress is counted in steps. `reduce` makes one number of those of all processes.
    losses = []
    for step, (characters, digit) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(characters), digit)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 100 == 99:
            mean = accelerator.reduce(torch.stack(losses[-20:]).mean(), "mean").item()
            accelerator.print(f"step {step + 1}: loss {mean:.4f}")

    first, last = (torch.stack(part).mean() for part in (losses[:20], losses[-20:]))
    first, last = accelerator.reduce((first, last), "mean")
    read = accelerator.gather(torch.tensor([stream.lines_read], device=accelerator.device)).tolist()
    accelerator.print(f"lines read by each process: {read}; loss fell from {first:.4f} to {last:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
