"""Evaluate on several processes and get the numbers of one.

One process:    python examples/evaluation.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/evaluation.py

The 1,797 digits of scikit-learn do not divide evenly. The last batches are filled up with samples from the start, so
that all processes take the same steps, and `gather_for_metrics` leaves these repeats out: every sample counts once.
"""

import argparse
from collections import Counter

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class Digits(Dataset):
    """Images, labels, and a name for each image: tensors and strings in one sample."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index], "name": f"digit {index}"}


def fit(digits, steps=200):
    """A quick model to have something to evaluate; the same on every process."""
    set_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.images), digits.labels).backward()
        optimizer.step()
    return model


def evaluate(batch_size):
    accelerator = Accelerator()
    digits = Digits()
    model, loader = accelerator.prepare(fit(digits), DataLoader(digits, batch_size=batch_size))

    model.eval()
    correct, samples, confused = 0, 0, Counter()
    for batch in loader:
        with torch.no_grad():
            predictions = model(batch["image"]).argmax(dim=-1)
        # Tensors and lists of other things, in any nesting; what comes back is the same on every process.
        seen = accelerator.gather_for_metrics(
            {"prediction": predictions, "label": batch["label"], "name": list(batch["name"])}
        )
        right = seen["prediction"] == seen["label"]
        correct += int(right.sum())
        samples += len(right)
        confused.update(name for name, is_right in zip(seen["name"], right.tolist(), strict=True) if not is_right)
    accuracy = correct / samples
    accelerator.print(f"{samples} samples on {accelerator.num_processes} process(es), accuracy {accuracy:.4f}")
    accelerator.print(f"{len(confused)} names of wrong answers, none of them twice: {max(confused.values()) == 1}")
    return samples, accuracy, sorted(confused.elements())


def main():
    parser = argparse.ArgumentParser(description="Evaluate on several processes.")
    parser.add_argument("--batch_size", type=int, default=64, help="of each process")
    evaluate(parser.parse_args().batch_size)


if __name__ == "__main__":
    main()
