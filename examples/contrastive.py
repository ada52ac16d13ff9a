"""Contrastive learning where the negatives come from all processes, with the gradients of one big batch.

One process:    python examples/contrastive.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/contrastive.py

Two encoders learn to put two views of the same thing close together, as CLIP does with images and their captions. The
other samples of the batch are the wrong answers, so a bigger batch is a harder and better exercise: each process should
see those of the others, too. Both commands above print the same numbers.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


class TwoEncoders(nn.Module):
    def __init__(self, first, second, width=16):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(first, 64), nn.ReLU(), nn.Linear(64, width))
        self.second = nn.Sequential(nn.Linear(second, 64), nn.ReLU(), nn.Linear(64, width))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        a = nn.functional.normalize(self.first(a), dim=-1)
        b = nn.functional.normalize(self.second(b), dim=-1)
        return a, b, self.temperature.exp()


def gather_with_gradients(accelerator, mine):
    """The vectors of all processes, through which gradients flow back to where each of them was made."""
    # `gather` returns plain values, so our own are put back in their place. The other processes do the same with
    # theirs: each then has the loss of the whole batch, and the part of its gradients that goes through its vectors.
    # These parts have to be added up, but the processes' gradients are averaged: so ours counts once for each process.
    n = accelerator.num_processes
    everyone = list(accelerator.gather(mine.detach()).chunk(n))
    everyone[accelerator.process_index] = mine.detach() + n * (
        mine - mine.detach()
    )  # the same value, n times the slope
    return torch.cat(everyone)


def contrastive_loss(a, b, temperature):
    similar = temperature * a @ b.T
    answers = torch.arange(len(a), device=a.device)  # the one with the same number
    return (nn.functional.cross_entropy(similar, answers) + nn.functional.cross_entropy(similar.T, answers)) / 2


def make_views(count):
    """Two different, noisy views of the same hidden thing."""
    things = torch.randn(count, 6)
    first = torch.tanh(things @ torch.randn(6, 32)) + 0.1 * torch.randn(count, 32)
    second = torch.tanh(things @ torch.randn(6, 24)) + 0.1 * torch.randn(count, 24)
    return TensorDataset(first, second)


@torch.no_grad()
def how_many_found(accelerator, model, loader):
    """The share of first views whose nearest second view, among all that there are, is the right one."""
    pairs = [accelerator.gather_for_metrics(model(a, b)[:2]) for a, b in loader]
    firsts, seconds = (torch.cat(views) for views in zip(*pairs, strict=True))
    nearest = (firsts @ seconds.T).argmax(dim=-1)
    return (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean().item()


def main(epochs=5, batch_size=128):
    # The order depends on the seed alone, not on the number of processes: that is what makes runs comparable.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    set_seed(0)
    train, test = torch.utils.data.random_split(make_views(2300), [2048, 252])
    batch_size //= accelerator.num_processes
    model = TwoEncoders(32, 24)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(train, batch_size, shuffle=True),
        DataLoader(test, batch_size),
    )

    untrained = how_many_found(accelerator, model, test_loader)
    for epoch in range(epochs):
        for first, second in train_loader:
            a, b, temperature = model(first, second)
            loss = contrastive_loss(
                gather_with_gradients(accelerator, a), gather_with_gradients(accelerator, b), temperature
            )
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

    found = how_many_found(accelerator, model, test_loader)
    accelerator.print(f"right pairs found among {len(test)}: rose from {untrained:.3f} to {found:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
