"""The end of a run."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import weakref
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import ending
from tests.harness import run_world


def evaluate_and_end() -> int:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(torch.ones(15, 4), batch_size=2))
    samples = 0
    for batch in loader:
        with torch.no_grad():
            outputs = model(batch)
        samples += len(accelerator.gather_for_metrics({"x": outputs, "name": ["a"] * len(batch)})["name"])
    accelerator.end_training()
    # The model is freed now, and with it the last reference to the group but ours.
    return samples


def test_a_run_can_be_ended_right_after_a_collective() -> None:
    for _ in range(6):
        assert run_world(evaluate_and_end, 2, timeout=30) == [15, 15]


def train_again_after_the_end() -> list[float]:
    losses = []
    threads = []
    for _ in range(5):
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = model(torch.ones(2, 4) * (accelerator.process_index + 1)).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(round(accelerator.reduce(loss.detach(), "mean").item(), 4))
        accelerator.end_training()
        # What a script may still ask for after the end.
        assert accelerator.is_main_process == (accelerator.process_index == 0)
        del model, optimizer, loss, accelerator
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[-1] == threads[1]  # those of earlier groups have ended
    return losses


def test_a_process_may_train_again_after_the_end() -> None:
    results = run_world(train_again_after_the_end, 2, timeout=60)
    assert results[0] == results[1]
    assert len(set(results[0])) == 1


LAST_WORDS = """
import sys
import torch
import torch.distributed as dist
from accelerate import PartialState
PartialState(cpu=True)
sys.setswitchinterval(100)  # threads of the process group do not get Python's lock until the script is at its end
def reduce_some():
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(8)]
    for work in works:
        work.wait()
for _ in range(3):
    reduce_some()
"""


def test_a_script_may_end_right_after_a_collective_without_ending_the_run(tmp_path: Path) -> None:
    # In 4 of 5 tries one of the four was aborted by torch ("terminate called without an active exception").
    script = tmp_path / "train.py"
    script.write_text(LAST_WORDS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr


def taken_down_by_the_script() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.ones(2))
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    naps: list[float] = []
    ending.time = SimpleNamespace(sleep=naps.append)  # type: ignore[attr-defined]
    ending._free_groups()  # as at the end of the program
    gc.collect()
    return [group() is None, bool(naps)]


def test_nothing_holds_a_group_at_the_end_that_the_script_has_taken_down_itself() -> None:
    """It would outlive the interpreter, and its threads, which ask for Python's lock, would abort the process."""
    assert run_world(taken_down_by_the_script, 2) == [[True, True]] * 2


AT_EXIT = """
import atexit, sys
def report():
    accelerator.wait_for_everyone()
    sys.stdout.write(f"{accelerator.gather(torch.ones(1)).tolist()}\\n")  # at once: two processes write
atexit.register(report)
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
"""


def asked_after_the_end() -> str:
    accelerator = Accelerator(cpu=True)
    dist.destroy_process_group()
    ending._free_groups()  # as at the end of the program
    try:
        accelerator.gather(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_who_asks_others_after_the_end_is_told_so() -> None:
    for rank, told in enumerate(run_world(asked_after_the_end, 2)):
        assert f"process group of rank {rank} has been destroyed" in told


def talked_at_the_end() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    naps: list[float] = []
    ending.time = SimpleNamespace(sleep=naps.append)  # type: ignore[attr-defined]
    before = ending.existing()
    ending._free_groups()  # as at the end of the program, with an exit handler of the script still to come
    counts = [len(naps)]
    gathered = accelerator.gather(torch.ones(1)).tolist()
    counts.append(len(naps))
    accelerator.wait_for_everyone()
    counts.append(len(naps))
    ending.set_current(before)
    return [gathered, 0 < counts[0] < counts[1] < counts[2]]


def shown_after_several_groups() -> str:
    for _ in range(3):
        Accelerator().end_training()
    Accelerator()
    with redirect_stderr(io.StringIO()) as screen:
        sys.excepthook(ValueError, ValueError("boom"), None)
    return screen.getvalue()


def test_an_error_has_the_rank_in_front_once_however_many_groups_there_were() -> None:
    assert run_world(shown_after_several_groups, 2) == [f"[rank{rank}]: ValueError: boom\n" for rank in (0, 1)]


def test_the_threads_may_finish_after_what_an_exit_handler_asks_of_the_others() -> None:
    """Nothing of ours comes after it, so a thread that asked for Python's lock then would abort the process."""
    assert run_world(talked_at_the_end, 2) == [[[1.0, 1.0], True]] * 2


def test_what_a_script_does_at_exit_may_still_talk_to_the_others(tmp_path: Path) -> None:
    """Also where it was registered before the import of this package, and so comes last."""
    script = tmp_path / "train.py"
    script.write_text(AT_EXIT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for launch, expected in (
        ([sys.executable], ["[1.0]"]),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], ["[1.0, 1.0]"] * 2),
    ):
        done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=100, env=env)
        said = [line for line in done.stdout.splitlines() if line.startswith("[1.0")]  # gloo of torch 2.9 greets, too
        assert said == expected, done.stderr
