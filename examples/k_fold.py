"""Cross-validation: every sample is tested once, by a model that has not seen it.

Needs:          pip install scikit-learn
One process:    python examples/k_fold.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/k_fold.py

Each fold is a new training with a new model. One Accelerator does for all of them: `free_memory` lets go of what the
fold before has prepared.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(folds=3, epochs=4, batch_size=64):
    accelerator = Accelerator()
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    # With a seed of its own, so that all processes cut the data alike.
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=0)

    first_losses, last_losses, right, tested = [], [], [], 0
    for fold, (train, test) in enumerate(splitter.split(digits.data, digits.target)):
        set_seed(fold)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        model, optimizer, train_loader, test_loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            DataLoader(Subset(dataset, train), batch_size // accelerator.num_processes, shuffle=True),
            DataLoader(Subset(dataset, test), batch_size),
        )

        losses = []
        for _ in range(epochs):
            for inputs, targets in train_loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        first_losses.append(losses[0].item())
        last_losses.append(losses[-1].item())

        correct = 0
        for inputs, targets in test_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            correct += (predictions == targets).sum().item()
        right.append(correct)
        tested += len(test)
        accelerator.print(f"fold {fold}: trained on {len(train)}, {correct} of {len(test)} right")
        model, optimizer, train_loader, test_loader = accelerator.free_memory(
            model, optimizer, train_loader, test_loader
        )

    first, last = sum(first_losses) / folds, sum(last_losses) / folds
    accelerator.print(
        f"{sum(right)} of {tested} right, each tested by the one model that had not seen it; "
        f"loss fell from {first:.3f} to {last:.3f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
