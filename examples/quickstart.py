"""Train a small network to read handwritten digits, on any number of processes.

One process:    python examples/quickstart.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/quickstart.py

It is a plain PyTorch loop. What makes it distributed is marked with (1) to (5).
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm.auto import tqdm

from accelerate import Accelerator
from accelerate.utils import set_seed


def make_datasets():
    """The 1,797 digits that come with scikit-learn, 8 by 8 pixels each: four fifths to train, one to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(epochs: int, batch_size: int, output: Path) -> float:
    accelerator = Accelerator()  # (1) finds out which device to use and how many processes there are
    set_seed(0)

    train_set, test_set = make_datasets()
    # The batch size given is for all processes together, so that each run takes the same steps.
    per_process = max(1, batch_size // accelerator.num_processes)
    train_loader = DataLoader(train_set, batch_size=per_process, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=per_process)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # (2) moves the model to its device, shares the batches out, averages gradients over the processes
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    accelerator.print(f"training on {accelerator.num_processes} process(es), device {accelerator.device.type}")

    progress = tqdm(total=epochs * len(train_loader), desc="training", disable=not accelerator.is_local_main_process)
    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # (3) instead of loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update()
    progress.close()

    model.eval()
    correct = total = 0
    for images, labels in test_loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        # (4) collects from every process, without the samples repeated to fill the last batch
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        total += len(labels)
    accuracy = correct / total
    accelerator.print(f"accuracy on {total} digits never seen in training: {accuracy:.4f}")

    accelerator.wait_for_everyone()
    # (5) one process writes, and what it writes loads into the plain model again
    accelerator.save(accelerator.unwrap_model(model).state_dict(), output)
    accelerator.print(f"model saved to {output}")
    accelerator.end_training()
    return accuracy


def main():
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=64, help="of all processes together")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart/model.pt"))
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    train(args.epochs, args.batch_size, args.output)


if __name__ == "__main__":
    main()
