"""Find out what a training step spends its time on: a table on the screen, and a trace to look at in a browser.

One process:    python examples/profiling.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/profiling.py
Look at it:     open https://ui.perfetto.dev and drop runs/profiling/profile_0.json on it

The first steps of a run are not like the others (memory is allocated, kernels are chosen), and a profile of all steps
is too big to look at. So a schedule says which ones to record.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import set_seed


def main(folder="runs/profiling"):
    def show(profiler):
        by = "self_cuda_time_total" if accelerator.device.type == "cuda" else "self_cpu_time_total"
        accelerator.print(profiler.key_averages().table(sort_by=by, row_limit=5, max_name_column_width=40))

    profile = ProfileKwargs(
        activities=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"],
        # Leave 5 steps out, warm the profiler up for 2, record 3: then no more.
        schedule_option={"wait": 5, "warmup": 2, "active": 3, "repeat": 1},
        on_trace_ready=show,
        output_trace_dir=folder,  # one file per process: who waits for whom can be seen by comparing them
    )
    accelerator = Accelerator(kwargs_handlers=[profile])
    set_seed(0)
    inputs = torch.randn(2048, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True)), 64 // accelerator.num_processes),
    )

    losses = []
    with accelerator.profile() as profiler:
        for x, y in loader:
            # Names of your own appear in the table and in the trace.
            with torch.profiler.record_function("forward"):
                loss = nn.functional.mse_loss(model(x), y)
            with torch.profiler.record_function("backward"):
                accelerator.backward(loss)
            with torch.profiler.record_function("step"):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            profiler.step()  # tells the schedule that a step is over

    accelerator.print(f"trace in {folder}; loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
