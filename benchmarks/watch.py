"""What the watch for hangs costs: run with `python -m torch.distributed.run --standalone --nproc_per_node 2`.

Its thread looks once a second. So the time of one look is the share of a second that it takes. Beside it, steps of
about 2 ms with the watch and without, in turns of the same processes: each round has one turn of both, in an order that
changes, and gives one ratio. What else the machine does falls on both; the median of many ratios tells how they differ,
and the interval of the median how well that is known.

That is measured twice: as it is, and with a hundred looks a second, which cost a hundred times as much. So a difference
that is too small to be seen in the first would be seen in the second.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import threading
import time

import torch

from accelerate import Accelerator
from accelerate.diagnosis import limits, place, watch
from accelerate.torch_internals.process_groups import collectives_begun

# Seconds between two looks, steps of a turn, and rounds. The first look comes one pause after the start of a watch, so
# a turn is longer than that.
AS_IT_IS = (1.0, 600, 40)
OFTEN = (0.01, 50, 400)


def look() -> float:
    """Seconds of one look at a thread, in the middle of a training, as the watch takes it when nothing gets on."""
    began = time.thread_time()
    for _ in range(1000):
        collectives_begun()
        place.signature(threading.get_ident())
        place.place_of(threading.get_ident())
    return (time.thread_time() - began) / 1000


class Training:
    """Steps of about 2 ms."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        self.model = self.accelerator.prepare(torch.nn.Sequential(*layers))
        self.optimizer = self.accelerator.prepare(torch.optim.SGD(self.model.parameters(), lr=0.0))

    def turn(self, name: str, limit: float, steps: int) -> float:
        """Seconds of one step. name: of the turn. limit: of the watch, or 0 for none."""
        environ = {**os.environ, limits.LIMIT: str(limit)}
        watch.start(self.accelerator.state.world, name, environ, device_works=lambda: False)
        batch = torch.ones(32, 256)
        self.accelerator.wait_for_everyone()
        began = time.perf_counter()
        for _ in range(steps):
            self.accelerator.backward(self.model(batch).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - began) / steps


def compare(training: Training, pause: float, steps: int, rounds: int) -> tuple[float, list[float]]:
    """A step's seconds without a watch, in the median; and of each round the time with one by that without, sorted."""
    watch._LOOK = pause
    order = random.Random(0)  # the same on all ranks
    without, ratios = [], []
    for number in range(rounds):
        taken = {}
        for limit in order.sample((0.0, 60.0), 2):
            taken[limit] = training.turn(f"{pause}-{number}-{limit}", limit, steps)
        without.append(taken[0.0])
        ratios.append(taken[60.0] / taken[0.0])
    return statistics.median(without), sorted(ratios)


def in_words(ratios: list[float]) -> str:
    """The median of sorted ratios, the interval that it is in with a probability of 95%, and that of half of them."""
    count = len(ratios)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = ratios[max(round(count / 2 - reach), 0)], ratios[min(round(count / 2 + reach), count - 1)]
    first, middle, third = statistics.quantiles(ratios, n=4)
    return (
        f"{middle - 1:+.2%} in the median of {count} rounds ({low - 1:+.2%} to {high - 1:+.2%} with 95%; half of the "
        f"rounds {first - 1:+.2%} to {third - 1:+.2%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=float, default=1.0, help="a factor for the numbers of rounds")
    factor = parser.parse_args().rounds
    training = Training()
    training.turn("first", 0.0, 200)
    one = look()
    found = {}
    for name, (pause, steps, rounds) in {"once": AS_IT_IS, "a hundred times": OFTEN}.items():
        found[name] = compare(training, pause, steps, max(round(rounds * factor), 4))
    if training.accelerator.is_main_process:
        print(f"a look: {one * 1e6:.0f} us once a second, {one:.4%} of the time")
        for name, (step, ratios) in found.items():
            print(f"a step of {step * 1e3:.3f} ms, with a watch that looks {name} a second: {in_words(ratios)}")
    training.accelerator.end_training()


if __name__ == "__main__":
    main()
