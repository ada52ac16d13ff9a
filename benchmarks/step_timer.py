"""What `accelerator.step_timer()` costs a step: the same small loop with and without it, in turns.

python benchmarks/step_timer.py
python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/step_timer.py
"""

import contextlib
import io
import statistics
import time

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator

STEPS = 200
ROUNDS = 31
STEP_SECONDS = 0.020  # the step that the cost is compared with


def seconds_per_step(accelerator: Accelerator, model, optimizer, loader, timed: bool) -> float:
    context = accelerator.step_timer() if timed else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()), context:
        start = time.perf_counter()
        for (batch,) in loader:
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / len(loader)


def main() -> None:
    accelerator = Accelerator()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(2)])
    data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS * accelerator.num_processes, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    seconds_per_step(accelerator, *parts, timed=True)
    costs = []
    for _ in range(ROUNDS):
        without = seconds_per_step(accelerator, *parts, timed=False)
        costs.append(seconds_per_step(accelerator, *parts, timed=True) - without)
    cost = statistics.median(costs)
    accelerator.print(
        f"{accelerator.device.type}, {accelerator.num_processes} process(es): {cost * 1e6:.0f} µs per step "
        f"(from {min(costs) * 1e6:.0f} to {max(costs) * 1e6:.0f}), {cost / STEP_SECONDS:.2%} of a 20 ms step"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
