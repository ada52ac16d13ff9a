"""What `accelerator.log` costs with `log_with="local"`, and a step of which its time is taken.

python benchmarks/local_log.py
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from accelerate import Accelerator

CALLS, ROUNDS = 2000, 21


def microseconds(call: Callable[[int], object]) -> str:
    """The median over rounds of the mean of a call: until it returns, and what of it this thread computes.

    So many calls in a row are more than a training makes: the thread that writes them takes turns with this one.
    """
    passed, computed = [], []
    for _ in range(ROUNDS):
        start, own = time.perf_counter(), time.thread_time()
        for number in range(CALLS):
            call(number)
        passed.append((time.perf_counter() - start) / CALLS * 1e6)
        computed.append((time.thread_time() - own) / CALLS * 1e6)
        time.sleep(0.2)
    return f"{statistics.median(passed):6.1f} µs, of which it computes {statistics.median(computed):.1f} µs"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(log_with="local", project_dir=folder)
        accelerator.init_trackers("bench")
        number = torch.ones((), device=accelerator.device)
        five = {f"value {index}": 0.5 for index in range(5)}
        print(f"on {accelerator.device}, {CALLS} calls in a row, {ROUNDS} times:")
        print("one number        ", microseconds(lambda step: accelerator.log({"loss": 0.5}, step=step)))
        print("five numbers      ", microseconds(lambda step: accelerator.log(five, step=step)))
        print("a tensor          ", microseconds(lambda step: accelerator.log({"loss": number}, step=step)))
        listener = accelerator.get_tracker("local")._after_step()
        print("the time of a step", microseconds(lambda step: listener()))
        accelerator.end_training()


if __name__ == "__main__":
    main()
