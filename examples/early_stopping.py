"""Stop when the model gets no better, on all processes at once, and keep the best one.

One process:    python examples/early_stopping.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/early_stopping.py

A big network and few noisy samples: it first learns the rule, then the noise by heart. The loss on other samples falls
and then rises again, and that is when to stop.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed


def make_data(count):
    inputs = torch.randn(count, 10)
    return TensorDataset(inputs, inputs[:, :3].sum(dim=1, keepdim=True) + torch.randn(count, 1))


class Patience:
    """Has there been nothing better for a while?"""

    def __init__(self, rounds):
        self.rounds, self.left = rounds, rounds
        self.best = float("inf")

    def better(self, loss):
        if loss < self.best:
            self.best, self.left = loss, self.rounds
            return True
        self.left -= 1
        return False


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    errors = []
    for inputs, targets in loader:
        error = (model(inputs) - targets).square()
        errors.append(accelerator.gather_for_metrics(error))
    model.train()
    return torch.cat(errors).mean().item()


def main(epochs=100, batch_size=32, folder="runs/early_stopping"):
    accelerator = Accelerator()
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 1))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(make_data(128), batch_size // accelerator.num_processes, shuffle=True),
        DataLoader(make_data(500), 250),
    )

    patience = Patience(rounds=3)
    untrained = evaluate(accelerator, model, test_loader)
    for epoch in range(epochs):
        for inputs, targets in train_loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        # One process might round differently, stop or save alone, and leave the others waiting forever. So all take the
        # loss of the first one; and a decision of one of them alone would be said aloud with `set_trigger`, which all
        # hear at the same place with `check_trigger`.
        loss = broadcast_object_list([evaluate(accelerator, model, test_loader)])[0]
        if patience.better(loss):
            accelerator.save_state(folder)  # replaces the one before, and never leaves half of one
        if accelerator.is_main_process and patience.left == 0:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(f"nothing better since epoch {epoch - patience.rounds}: stopping after epoch {epoch}")
            break

    last = evaluate(accelerator, model, test_loader)
    accelerator.load_state(folder)
    best = evaluate(accelerator, model, test_loader)
    accelerator.print(f"at the end it was {last:.3f}; loss on other samples fell from {untrained:.3f} to {best:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
