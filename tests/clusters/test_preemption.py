"""A signal to one rank stops all of them at the same step; a preempted run continues as if nothing had happened."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.config.preemption import PREEMPTED
from accelerate.runs import store
from accelerate.runs.read import Project
from accelerate.state import stopping
from accelerate.utils import ProjectConfiguration
from tests.harness import run_world

TRAIN = Path(__file__).parent / "preempted.py"


def steps_until_stopped(together: bool) -> list[Any]:
    """Rank 1 gets the signal. together: the ranks meet in a collective at each step."""
    accelerator = Accelerator(cpu=True)
    steps = 0
    while not accelerator.should_stop and steps < 20000:
        steps += 1
        if together:
            accelerator.reduce(torch.ones(1))
        else:
            time.sleep(0.001 * (1 + accelerator.process_index))
        if steps == 5 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    still = accelerator.should_stop
    accelerator.wait_for_everyone()
    return [steps, still, accelerator.stop_reason]


@pytest.mark.parametrize("together", [True, False])
def test_all_ranks_stop_at_the_same_step(together: bool) -> None:
    told = run_world(steps_until_stopped, 3, together)
    assert told[0] == told[1] == told[2]
    steps, still, reason = told[0]
    assert 5 <= steps < 20000 and still and reason == "SIGTERM on rank 1"


def all_signalled_at_once() -> int:
    accelerator = Accelerator(cpu=True)
    steps = 0
    while not accelerator.should_stop and steps < 20000:
        steps += 1
        accelerator.reduce(torch.ones(1))
        if steps == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
    accelerator.end_training()
    return steps


def test_a_signal_to_every_rank_is_one() -> None:
    first, second = run_world(all_signalled_at_once, 2)
    assert first == second < 20000


def stopped_alone() -> list[Any]:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    accelerator = Accelerator(cpu=True)
    answers: list[Any] = [accelerator.should_stop, accelerator.stop_reason]
    os.kill(os.getpid(), signal.SIGUSR1)
    answers += [accelerator.should_stop, accelerator.stop_reason, heard == [signal.SIGUSR1]]
    stopping.close()
    return [*answers, signal.getsignal(signal.SIGUSR1) is mine, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]


def test_one_process_keeps_the_scripts_own_handler() -> None:
    assert run_world(stopped_alone, 1) == [[False, None, True, "SIGUSR1 on rank 0", True, True, True]]


def signalled_at_step(step: int, folder: str) -> list[Any]:
    """Rank 1 gets the signal in a step of the training; returns how the program would end, and what was saved."""
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True), preemption="save"
    )
    # The ranks agree beside the training: it must not have ended by then, however late that is on a busy machine.
    loader = torch.utils.data.DataLoader(torch.ones(40000, 1), batch_size=1)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    steps = 0
    try:
        for batch in loader:
            steps += 1
            if steps == step and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            accelerator.backward(model(batch).sum())
    except SystemExit as end:
        return [end.code, steps, os.listdir(os.path.join(folder, "checkpoints"))]
    return ["went on"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_signal_in_the_first_step_saves_too(step: int, tmp_path: Path) -> None:
    """It may be a long one: models are compiled in it."""
    first, second = run_world(signalled_at_step, 2, step, str(tmp_path))
    assert first == second and first[0] == PREEMPTED and first[1] >= step and first[2] == ["checkpoint_0"]


def test_settings_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(ValueError, match="`preemption` is 'ignore': choose 'save'"):
        Accelerator(cpu=True, project_config=project, preemption="ignore")
    with pytest.raises(ValueError, match="`preemption` is 'save' and needs a folder for checkpoints"):
        Accelerator(cpu=True, preemption="save")
    monkeypatch.setenv("ACCELERATE_RESUME", "auto")
    with pytest.raises(ValueError, match=r"`--resume` \(the variable ACCELERATE_RESUME\) is 'auto' and needs a folder"):
        Accelerator(cpu=True, project_dir=str(tmp_path))
    assert not Accelerator(cpu=True, project_config=project).resume()  # an empty project


def test_a_script_that_does_not_resume_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def accelerator() -> Accelerator:
        return Accelerator(
            cpu=True, project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        )

    monkeypatch.setenv("ACCELERATE_RESUME", "auto")
    forgotten = accelerator()
    with pytest.warns(UserWarning, match="with `--resume auto`, but the script has not loaded a checkpoint") as told:
        forgotten.save_state()
        forgotten.save_state()
    assert len(told) == 1 and told[0].filename == __file__
    with pytest.warns(UserWarning, match="call `accelerator.resume"):
        accelerator().end_training()
    for load in (Accelerator.resume, Accelerator.load_state):  # a script may load by itself
        load(loaded := accelerator())
        loaded.end_training()
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    assert capsys.readouterr().err == f"--resume auto: this run continues from {newest}.\n"


def launch(
    processes: int, folder: Path, *words: str, to_launcher: signal.Signals | None = None, restarts: int = 0
) -> tuple[int, str]:
    """Runs the script; to_launcher: and sends this signal to the launcher, once the script asks for it.

    It comes twice, as from a cluster that signals a group of processes and one that is in it.
    """
    folder.mkdir(exist_ok=True)
    asked = [
        "--cpu",
        f"--num_processes={processes}",
        "--preemption=save",
        "--resume=auto",
        f"--max_restarts={restarts}",
    ]
    command = [sys.executable, "-m", "accelerate", "launch", *asked, str(TRAIN), str(folder), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": "/nonexistent"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    if to_launcher is not None:
        while not (folder / "ready").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(to_launcher)
        time.sleep(0.05)
        process.send_signal(to_launcher)
    try:
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, said


def seen(folder: Path) -> list[str]:
    """What all ranks wrote down of their steps, and of their weights at the end."""
    lines = [line for path in sorted(folder.glob("rank*")) for line in path.read_text().splitlines()]
    return sorted(lines)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_preempted_run_continues_as_if_nothing_had_happened(processes: int, tmp_path: Path) -> None:
    code, said = launch(processes, tmp_path / "whole")
    assert code == 0, said
    if processes == 2:
        code, said = launch(2, tmp_path / "cut", "--signal", "rank", restarts=2)  # which it does not need
        assert code == 75, said
        assert "SIGTERM on rank 1: the run was saved to " in said and "Traceback" not in said
    other = signal.SIGUSR1 if processes == 2 else signal.SIGTERM
    code, said = launch(processes, tmp_path / "cut", "--signal", "launcher", to_launcher=other)
    assert code == 75, said
    code, said = launch(processes, tmp_path / "cut")
    assert code == 0, said
    assert seen(tmp_path / "cut") == seen(tmp_path / "whole")
    *preempted, last = Project(store.place(tmp_path / "cut")).runs()
    assert (last.state, last.reason, last.resumed) == ("ended", None, processes)
    assert [run.resumed for run in preempted] == [None, 1][:processes]
    assert {(run.state, run.reason) for run in preempted} == {("ended", "preempted, and saved")}


def test_an_error_ends_the_other_ranks_and_is_the_last_word(tmp_path: Path) -> None:
    """The launcher ends them by SIGTERM: nobody can be saved together with a rank that is gone."""
    code, said = launch(2, tmp_path, "--signal", "error")
    assert code == 1, said
    assert "Rank 1 on" in said and said.rstrip().endswith("ValueError: a broken sample"), said
    assert not (tmp_path / "checkpoints").exists()


def pickled() -> bool:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.should_stop
    again = pickle.loads(pickle.dumps(accelerator))
    return not again.should_stop


def test_an_accelerator_that_asks_can_be_pickled() -> None:
    assert run_world(pickled, 1) == [True]


def test_workers_that_stay_do_not_hold_up_the_end(tmp_path: Path) -> None:
    code, said = launch(1, tmp_path, "--workers", "1", "--stay")
    assert code == 0, said
