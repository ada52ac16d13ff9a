"""Log a training, look at its curves, and see where the time of its steps goes.

Needs scikit-learn:  pip install scikit-learn
One process:         python examples/tracking.py
Two processes:       accelerate launch --cpu --num_processes 2 examples/tracking.py
Look at it:          accelerate runs runs/tracking            (a list, in the terminal)
                     accelerate runs runs/tracking --serve    (curves, in a browser)
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def train(epochs: int, project_dir: str) -> dict[str, float]:
    """The milliseconds of each phase of a step, on this run's slowest process."""
    # "local" needs no other library. Any other tracker is its name, as "tensorboard" or "wandb", or several in a list.
    accelerator = Accelerator(log_with="local", project_dir=project_dir)
    config = {"epochs": epochs, "learning_rate": 3e-3, "batch_size": 32, "processes": accelerator.num_processes}
    accelerator.init_trackers("digits", config=config)
    set_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, losses = 0, []
    with accelerator.step_timer() as timer:  # prints its table at the end of the block, and logs it
        for _ in range(epochs):
            for inputs, targets in loader:
                logits = model(inputs)
                loss = nn.functional.cross_entropy(logits, targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                accuracy = (logits.argmax(dim=-1) == targets).float().mean()
                accelerator.log({"loss": loss, "accuracy": accuracy}, step=step)
                losses.append(loss.detach())  # `.item()` would make the host wait for the device, at every step
                step += 1

    accelerator.print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.end_training()
    return {phase: seconds * 1000 for phase, seconds in timer.seconds[timer.slowest].items()}


def main():
    parser = argparse.ArgumentParser(description="Log a training and time its steps.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--project_dir", default="runs/tracking")
    args = parser.parse_args()
    train(args.epochs, args.project_dir)


if __name__ == "__main__":
    main()
