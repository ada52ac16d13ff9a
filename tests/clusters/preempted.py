"""A training that writes down what it sees, for tests that preempt it."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed


class Progress:
    epoch = 0
    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.steps = state["epoch"], state["steps"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--signal", choices=["rank", "launcher", "error"])
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
        log_with="local",
    )
    set_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    parts: list[Any] = [net, torch.optim.AdamW(net.parameters(), lr=0.1)]
    parts.append(torch.optim.lr_scheduler.StepLR(parts[1], 3))
    data = TensorDataset(torch.arange(80.0).reshape(40, 2) / 80)
    workers = {"num_workers": arguments.workers, "persistent_workers": arguments.stay}
    parts += [DataLoader(data, batch_size=2, shuffle=True, **workers), DataLoader(data, batch_size=8)]
    model, optimizer, scheduler, loader, evaluation = accelerator.prepare(*parts)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.resume()
    accelerator.init_trackers("preempted")
    begun = progress.steps
    last = accelerator.process_index == accelerator.num_processes - 1
    with open(folder / f"rank{accelerator.process_index}", "a") as file:
        while progress.epoch < 4:
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                progress.steps += 1
                file.write(f"{progress.epoch} {batch.flatten().tolist()} {loss.item()}\n")
                file.flush()
                if arguments.signal == "rank" and last and progress.steps == begun + 7:
                    os.kill(os.getpid(), signal.SIGTERM)
                if arguments.signal == "error" and last and progress.steps == 7:
                    raise ValueError("a broken sample")
                if arguments.signal == "launcher" and progress.steps > begun + 5:
                    (folder / "ready").touch()
                    time.sleep(0.2)  # so that it is still training when the signal comes
            with torch.no_grad():
                total = sum(float(accelerator.gather_for_metrics(model(batch)).sum()) for (batch,) in evaluation)
            file.write(f"{progress.epoch} evaluation {total}\n")
            file.flush()
            progress.epoch += 1
        file.write(f"weights {[p.tolist() for p in accelerator.unwrap_model(model).parameters()]}\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
