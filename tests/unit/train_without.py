"""Trains on one device as if torch had lost a private name, for each of the names given, in a process of its own.

`python -m tests.unit.train_without FOLDER NAME...` writes what came out to FOLDER/NAME, in JSON: losses or a traceback.
"nothing" hides nothing. Forked from a process that has imported torch, and nothing of accelerate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
import torch._dynamo
import torch.distributed.algorithms.join
import torch.distributed.device_mesh
import torch.utils.data
from torch import nn

__all__ = ["numpy", "safetensors"]  # imported, as the private one of torch, so that each process need not


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Draws something for each sample, too."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4,), index / 16) + 0.1 * torch.rand(4)
        return x, x.sum(0, keepdim=True)


class Net(nn.Module):
    """A buffer that is saved and one that is not, an RNN, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.again = nn.Linear(4, 1)
        self.again.weight = self.out.weight
        self.register_buffer("share", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.rnn(x[:, None])[0][:, 0])
        return self.share * (self.out(hidden) + self.again(hidden))


def train(precision: str, folder: Path) -> Iterator[float]:
    """The losses of two epochs with a save in the middle of the second, and from there on once more."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
    )
    net: Any = Net()
    loader: Any = torch.utils.data.DataLoader(Noisy(), batch_size=2, shuffle=True)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.02, fused=precision == "fp16")
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)

    def epoch(save_at: int | None = None) -> Iterator[float]:
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                    accelerator.clip_grad_norm_(net.parameters(), 0.4)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if number == save_at:  # inside an accumulation window
                accelerator.save_state(str(folder / "state"))
            yield loss.item()

    yield from epoch()
    second = list(epoch(save_at=4))
    yield from second
    accelerator.load_state(str(folder / "state"))
    assert list(epoch()) == second[5:], "the resumed epoch is another one"
    accelerator.save_model(net, str(folder / "model"))
    yield sum(parameter.abs().sum().item() for parameter in accelerator.unwrap_model(net).parameters())
    accelerator.free_memory()


def train_two(precision: str) -> Iterator[float]:
    """Two optimizers that step in turns, with losses that are sums."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    nets: Any = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers: Any = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    *prepared, first, second = accelerator.prepare(*nets, *optimizers)
    for number in range(6):
        for net, optimizer in zip(prepared, (first, second), strict=True):
            with accelerator.accumulate(net):
                loss = net(torch.full((2, 4), 0.1 * number)).sub(1).square().sum()
                accelerator.backward(loss, num_items=2)
                optimizer.step()
                optimizer.zero_grad()
            yield loss.item()


def outcome(name: str) -> Any:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        from tests.unit.torch_names import Hiding

        if name != "nothing":
            Hiding(name).install()
        with tempfile.TemporaryDirectory() as folder:
            from accelerate.state import AcceleratorState

            losses = list(train("no", Path(folder)))
            AcceleratorState._reset_state(True)
            losses += train("fp16", Path(folder) / "fp16")
            return losses + list(train_two("no")) + list(train_two("fp16"))
    except BaseException:
        return traceback.format_exc()


def main(folder: Path, names: list[str]) -> None:
    gc.freeze()  # what is there already: no process need look at it again
    for number, name in enumerate(names):
        if number >= 2:
            os.wait()
        if os.fork() == 0:
            (folder / name).write_text(json.dumps(outcome(name)))
            os._exit(0)
    for _ in names[:2]:
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
