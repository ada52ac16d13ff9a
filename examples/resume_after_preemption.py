"""Survive a machine that is taken away: save when the signal comes, and go on from there the next time.

One process:    python examples/resume_after_preemption.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/resume_after_preemption.py

Clusters and cheap cloud machines send SIGTERM (Slurm: `#SBATCH --signal=TERM@120`) some time before they end a job.
Run either command with `--preempt_at 20`, which sends that signal at the 20th step, and then without it. The second run
goes on where the first one stopped, on any number of processes, and ends as if nothing had happened.
"""

import argparse
import glob
import os
import shutil
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed


class Progress:
    """What this script wants to find again besides models, optimizers, loaders and random numbers."""

    def __init__(self):
        self.epoch, self.step, self.first_loss = 0, 0, None

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def make_data():
    inputs = torch.randn(512, 16)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def main(epochs=6, batch_size=32, folder="runs/preemption", preempt_at=None):
    accelerator = Accelerator(
        # checkpoints/checkpoint_0, checkpoint_1, ...: the last two are kept.
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
        # A loader that is loaded starts at the first sample that was not seen, in the middle of its epoch.
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
        # When the signal comes to any process, all of them save after the same step, and end with code 75: "try again".
        preemption="save",
    )
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.05), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(make_data(), batch_size // accelerator.num_processes, shuffle=True),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    # `accelerator.resume()` is the same for a run that is launched with `--resume auto`.
    if glob.glob(os.path.join(folder, "checkpoints", "checkpoint_*")):
        accelerator.load_state()  # the newest one that is complete
        accelerator.print(f"going on in epoch {progress.epoch} at step {progress.step}")

    while progress.epoch < epochs:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.first_loss = progress.first_loss or loss.item()
            if progress.step == preempt_at and accelerator.is_main_process:
                os.kill(os.getpid(), signal.SIGTERM)  # as the cluster would
        progress.epoch += 1
        accelerator.save_state()  # nobody warns before a power cut

    steps = f"{progress.step} steps on {accelerator.num_processes} process(es)"
    accelerator.print(f"{steps}; loss fell from {progress.first_loss:.6f} to {loss.item():.6f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)  # so that the example can be run again
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, be preempted, and go on.")
    parser.add_argument("--preempt_at", type=int, help="the step at which this run gets SIGTERM")
    main(preempt_at=parser.parse_args().preempt_at)
