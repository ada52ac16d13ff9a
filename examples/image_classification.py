"""Train an image classifier: augmentation, a learning-rate schedule, exact evaluation, and the best weights kept.

One process:    python examples/image_classification.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/image_classification.py
Every GPU:      accelerate launch --mixed_precision bf16 examples/image_classification.py

The images are drawn by the script: a disc, a square or a cross, somewhere in a noisy picture of 16 by 16 pixels.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed

CLASSES = ["disc", "square", "cross"]


class Shapes(Dataset):
    """What torchvision's ImageFolder would be: an image and a label for each index."""

    def __init__(self, count, seed, augment=False):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % len(CLASSES)
        self.images = 0.5 * torch.randn(count, 1, 16, 16, generator=draw)
        self.augment = augment
        centers = torch.randint(4, 12, (count, 2), generator=draw)
        sizes = torch.randint(2, 5, (count,), generator=draw)
        for image, label, (row, column), size in zip(self.images, self.labels, centers, sizes, strict=True):
            down = torch.arange(16)[:, None] - row
            right = torch.arange(16)[None, :] - column
            inside = [
                down**2 + right**2 <= size**2,
                (down.abs() < size) & (right.abs() < size),
                ((down == 0) & (right.abs() <= size)) | ((right == 0) & (down.abs() <= size)),
            ][label]
            image[0, inside] += 2.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return {"image": image, "label": self.labels[index]}


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4, len(CLASSES)),
    )


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        predictions = model(batch["image"]).argmax(dim=-1)
        # The processes share the images out among them. This puts the answers together again, and leaves out the
        # samples that were repeated so that all processes got the same number: every image counts once.
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["label"]))
        right += (predictions == labels).sum().item()
        total += len(labels)
    model.train()
    return right / total


def main(epochs=4, batch_size=64, folder="runs/image_classification"):
    accelerator = Accelerator()
    set_seed(0)

    # `batch_size` is per process. Dividing it keeps the number of images in a step, and so the learning rate, the same
    # however many processes there are.
    batch_size //= accelerator.num_processes
    train_loader = DataLoader(Shapes(1536, seed=1, augment=True), batch_size, shuffle=True)
    test_loader = DataLoader(Shapes(250, seed=2), batch_size)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Written for the loader as it is here, before it is shared out. A prepared schedule takes one step per process.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(train_loader))

    model, optimizer, schedule, train_loader, test_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader, test_loader
    )

    untrained = best = evaluate(accelerator, model, test_loader)
    for epoch in range(epochs):
        for batch in train_loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
        # All processes have the same accuracy, so all come to the same decision. One of them writes.
        if accuracy > best:
            best = accuracy
            accelerator.save_model(model, folder)

    accelerator.print(f"weights in {folder}; accuracy rose from {untrained:.3f} to {best:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
