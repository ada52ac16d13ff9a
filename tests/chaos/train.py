"""A small training that writes down which samples it has seen at which step, for runs that are disturbed."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list, set_seed

SAMPLES = 240
BATCH = 2


class Progress:
    epoch = 0
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("project", type=Path)
    parser.add_argument("log", type=Path, help="a folder in which each rank has a file")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--until", type=Path, help="end after the epoch in which this file appears")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--leash", type=Path, help="a file with the number of the step after which to wait")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a collective may take")
    arguments = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(arguments.project), automatic_checkpoint_naming=True, total_limit=3),
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=arguments.patience))],
    )
    set_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    values = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    data = TensorDataset(torch.arange(SAMPLES), values)
    parts: list[Any] = [
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        DataLoader(data, batch_size=BATCH, shuffle=True),
    ]
    model, optimizer, loader = accelerator.prepare(*parts)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.resume()
    # All ranks of one start write the same number, and those of a later start a greater one.
    start = broadcast_object_list([time.time_ns()])[0]
    file = os.open(arguments.log / f"rank{accelerator.process_index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**what: Any) -> None:
        os.write(file, (json.dumps({"start": start, "step": progress.step, **what}) + "\n").encode())

    note(begins=os.getpid(), processes=accelerator.num_processes)
    while progress.epoch < arguments.epochs:
        for ids, batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            note(epoch=progress.epoch, samples=ids.tolist())
            if accelerator.gradient_state.end_of_dataloader:
                progress.epoch += 1  # a checkpoint of the last batch continues with the next epoch
            if progress.step % 10 == 0:
                accelerator.save_state()
            time.sleep(arguments.pause)
            while arguments.leash is not None and progress.step >= int(arguments.leash.read_text()):
                time.sleep(0.05)
        # Rank 0 decides: the others may see the file at another moment.
        if arguments.until is not None and broadcast_object_list([arguments.until.exists()])[0]:
            break
    weights = b"".join(value.detach().numpy().tobytes() for value in accelerator.unwrap_model(model).parameters())
    note(weights=hashlib.sha256(weights).hexdigest())
    accelerator.end_training()


if __name__ == "__main__":
    main()
