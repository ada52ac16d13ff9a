"""What the watch for hangs costs: run with `python -m torch.distributed.run --standalone --nproc_per_node 2`.

Its thread looks once a second. So the time of one look is the share of a second that it takes; beside it, steps of
about 2 ms with the watch and without, in turns.
"""

from __future__ import annotations

import os
import threading
import time

import torch

from accelerate import Accelerator
from accelerate.diagnosis import limits, place, watch
from accelerate.torch_internals.process_groups import collectives_begun

STEPS, ROUNDS = 300, 12


def look() -> float:
    """Seconds of one look at a thread, in the middle of a training, as the watch takes it when nothing gets on."""
    began = time.thread_time()
    for _ in range(1000):
        collectives_begun()
        place.signature(threading.get_ident())
        place.place_of(threading.get_ident())
    return (time.thread_time() - began) / 1000


def steps(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one step."""
    batch = torch.ones(32, 256)
    began = time.perf_counter()
    for _ in range(STEPS):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    accelerator = Accelerator(cpu=True)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = accelerator.prepare(torch.nn.Sequential(*layers))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    world = accelerator.state.world
    found: dict[str, list[float]] = {"with": [], "without": []}
    steps(accelerator, model, optimizer)
    for number in range(ROUNDS):
        for name, limit in (("with", "60"), ("without", "0")) if number % 2 else (("without", "0"), ("with", "60")):
            watch.start(world, f"bench-{number}", {**os.environ, limits.LIMIT: limit})
            accelerator.wait_for_everyone()
            found[name].append(steps(accelerator, model, optimizer))
    one = look()
    if accelerator.is_main_process:
        # The best of each: what else the machine does comes and goes.
        both = {name: min(times) * 1e3 for name, times in found.items()}
        print(f"a look: {one * 1e6:.0f} us once a second, {one:.4%} of the time")
        print(f"a step: {both['with']:.3f} ms with the watch, {both['without']:.3f} ms without")
    accelerator.end_training()


if __name__ == "__main__":
    main()
