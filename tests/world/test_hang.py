"""A run that hangs says which rank waits where, whoever started it, and through what it hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.diagnosis import limits, place, roll, watch
from accelerate.diagnosis.place import Place
from accelerate.diagnosis.roll import Note, Notes
from accelerate.launch.engines.single import WORKER
from tests.harness import run_world, world_outcomes
from tests.harness.world import free_port
from tests.world.test_launch import LAUNCH, TWO, environment, launch, script

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SHORT = ["--hang_timeout", "2", "--hang_timeout_action", "abort"]
START = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
accelerator.gather(torch.ones(1))

def load_batch():
    time.sleep(1000)

"""


def run(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return launch(folder, *TWO, *SHORT, *words, script(folder, START + text))


def roll_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == limits.ABORTED, done.stderr
    assert done.stderr.count("The ranks wait for each other") == 1, done.stderr
    found = re.search(r"The ranks wait for each other: (.*)\n(.*) All stacks are in (.*)\.\n", done.stderr)
    assert found is not None, done.stderr
    text = Path(found.group(3)).read_text()
    assert "--- rank 0 on" in text and "train.py" in text
    last = done.stderr.splitlines()[-1]
    assert last == "The run was ended because its ranks waited for each other, as shown above." and "fail" not in last
    return re.sub(r"since \d+ s", "since S", " ".join(found.groups()[:2]))


def test_a_collective_that_only_one_rank_calls(tmp_path: Path) -> None:
    text = "if accelerator.is_main_process:\n    accelerator.gather(torch.ones(1))\nelse:\n"
    done = run(tmp_path, text + "    accelerator.wait_for_everyone()\n")
    told = roll_of(done)
    assert "rank 0 waits in gather (train.py:14) since S; rank 1 waits in wait_for_everyone (train.py:16)" in told
    assert "Ranks wait in different calls" in told


UNEVEN = (
    "from torch.utils.data import DataLoader\n"
    "from accelerate import DataLoaderConfiguration\n"
    "accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))\n"
    "for batch in accelerator.prepare(DataLoader(torch.arange(5), batch_size=1)):\n"
    "    accelerator.gather_for_metrics(batch)\n"
)


def test_a_metric_of_a_batch_that_not_all_ranks_have(tmp_path: Path) -> None:
    told = roll_of(run(tmp_path, UNEVEN + "accelerator.wait_for_everyone()\n"))
    assert "rank 0 waits in gather_for_metrics (train.py:17)" in told
    assert "or in a loop that is longer on some ranks, as with `even_batches=False`" in told


def test_a_metric_of_a_batch_that_a_rank_which_has_ended_does_not_have(tmp_path: Path) -> None:
    done = launch(tmp_path, *TWO, script(tmp_path, START + UNEVEN))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "needed rank 1, which had ended already with code 0: look for a loop that is shorter there" in last
    assert "end together, unless `even_batches=False` was asked for" in last


def test_a_rank_that_is_busy(tmp_path: Path) -> None:
    told = roll_of(run(tmp_path, "if rank == 1:\n    load_batch()\ntorch.distributed.all_reduce(torch.ones(1))\n"))
    assert "rank 0 waits in all_reduce (train.py:15) since S; rank 1 runs train.py:11 (load_batch)" in told
    assert "The others wait for rank 1, which has not got there yet." in told


def test_inside_of_ddp(tmp_path: Path) -> None:
    text = "model = accelerator.prepare(torch.nn.Linear(2, 1))\nif rank:\n    load_batch()\n"
    told = roll_of(run(tmp_path, text + "model(torch.ones(1, 2)).sum().backward()\n"))
    assert "rank 0 waits in " in told and "(train.py:16) since S; rank 1 runs train.py:11" in told


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_buffers_that_ddp_exchanges_before_a_forward(tmp_path: Path, mode: str) -> None:
    text = f"model = accelerator.prepare(torch.nn.BatchNorm1d(2).{mode}())\nif rank:\n    load_batch()\n"
    told = roll_of(run(tmp_path, text + "model(torch.ones(2, 2))\n"))
    assert "rank 0 waits in forward (train.py:16) since S; rank 1 runs train.py:11" in told


def test_ranks_that_go_on_in_a_group_of_their_own(tmp_path: Path) -> None:
    text = (
        "groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])]\n"
        "while rank == 2:\n    torch.distributed.all_reduce(torch.ones(1), group=groups[1])\n    time.sleep(0.01)\n"
        "if rank == 1:\n    load_batch()\ntorch.distributed.all_reduce(torch.ones(1), group=groups[0])\n"
    )
    words = ["--cpu", "--num_processes", "3", "--main_process_port", "0", *SHORT]
    told = roll_of(launch(tmp_path, *words, script(tmp_path, START + text)))
    assert "rank 1 runs train.py:11 (load_batch); rank 2 shows no sign of life" in told
    assert "wait for rank 1, which has not got there yet, or for rank 2, which shows no sign of life: stopped, " in told


def test_work_that_is_waited_for(tmp_path: Path) -> None:
    text = (
        "if rank:\n    load_batch()\nwork = torch.distributed.all_reduce(torch.ones(1), async_op=True)\nwork.wait()\n"
    )
    assert "rank 0 waits in wait (train.py:16) since S; rank 1 runs" in roll_of(run(tmp_path, text))


def test_under_torchrun(tmp_path: Path) -> None:
    path = script(tmp_path, START + "if rank:\n    load_batch()\naccelerator.wait_for_everyone()\n")
    env = {**environment(tmp_path), limits.LIMIT: "2", limits.ACTION: "abort"}
    done = subprocess.run([*TORCHRUN, path], capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path)
    assert "rank 0 waits in wait_for_everyone (train.py:15) since" in done.stderr, done.stderr


def test_control_c_shows_the_roll_once_more(tmp_path: Path) -> None:
    path = script(tmp_path, START + "if rank:\n    load_batch()\naccelerator.wait_for_everyone()\n")
    words = [*LAUNCH, *TWO, "--hang_timeout", "2", path]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=environment(tmp_path), cwd=tmp_path, start_new_session=True
    ) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "The ranks wait for each other" in line:
                break
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        told = launcher.stderr.read()
    roll_again = r"The ranks wait for each other: rank 0 .*; rank 1 runs train\.py:11 \(load_batch\)"
    assert re.search(roll_again, told), told
    assert "Traceback" not in told and "Error" not in told, told


ONLY_ONE = """
if rank == {rank}:
    from accelerate import Accelerator
    Accelerator(cpu=True)
"""


@pytest.mark.parametrize(
    ("rank", "started", "absent"),
    [(0, [*LAUNCH, *TWO], "rank 1 ended with code 0"), (1, [*LAUNCH, *TWO], "rank 0 ended with code 0"),
     (0, TORCHRUN, "rank 1 has not come"), (1, [], "rank 0 has not come")],
)  # fmt: skip
def test_an_accelerator_that_only_one_rank_makes(tmp_path: Path, rank: int, started: list[str], absent: str) -> None:
    path = script(tmp_path, ONLY_ONE.format(rank=rank))
    alone = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**environment(tmp_path), limits.LIMIT: "1", **({} if started else alone)}
    with subprocess.Popen(
        [*(started or [sys.executable]), path], stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as launcher:
        assert launcher.stderr is not None
        told = next((line for line in launcher.stderr if "Not all ranks have come: " in line), "nothing was told")
        reason = launcher.stderr.readline()
        launcher.terminate()
        launcher.stderr.read()
    parts = [f"rank {rank} waits in Accelerator (train.py:6) since S", absent]
    assert re.sub(r"since \d+ s", "since S", told) == f"Not all ranks have come: {'; '.join(sorted(parts))}.\n"
    assert f"The others wait for rank {1 - rank} to join them: look for an `Accelerator()` that only some" in reason


def note_of_an_interrupted_rank() -> str:
    accelerator = Accelerator(cpu=True)
    watching = watch.current()
    assert watching is not None
    if accelerator.process_index == 1:
        while watching.everybody()[1].kind != "runs":
            time.sleep(0.01)
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        watching.leave()  # as at the end of a program
    accelerator.wait_for_everyone()
    return watching.everybody()[1].kind


def test_a_rank_that_control_c_has_ended_is_shown_where_it_was() -> None:
    """Others show the roll when it may be gone already, and it did not end by itself."""
    assert run_world(note_of_an_interrupted_rank, 2, env={limits.LIMIT: "2"}) == ["runs", "runs"]


def hang_in_a_notebook() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.ones(1))
    if accelerator.process_index:
        import time

        time.sleep(1000)
    accelerator.wait_for_everyone()


def test_in_a_notebook(tmp_path: Path) -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from accelerate import notebook_launcher\n"
        "from tests.world.test_hang import hang_in_a_notebook\n"
        "notebook_launcher(hang_in_a_notebook, num_processes=2, use_port='0')\n"
    )
    env = {**environment(tmp_path), limits.LIMIT: "2", limits.ACTION: "abort", "ACCELERATE_USE_CPU": "1"}
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path)
    assert "rank 0 waits in wait_for_everyone (test_hang.py:" in done.stderr, done.stderr
    assert "rank 1 runs test_hang.py:" in done.stderr


def names_of_threads() -> list[str]:
    import threading

    Accelerator(cpu=True)
    return [thread.name for thread in threading.enumerate()]


def test_it_can_be_turned_off() -> None:
    assert all("accelerate-watch" in names for names in run_world(names_of_threads, 2))
    assert not any("accelerate-watch" in names for names in run_world(names_of_threads, 2, env={limits.LIMIT: "0"}))


@pytest.mark.parametrize(("name", "value"), [(limits.LIMIT, "soon"), (limits.LIMIT, "-1"), (limits.ACTION, "kill")])
def test_settings_that_cannot_be_read(name: str, value: str) -> None:
    for outcome in world_outcomes(names_of_threads, 2, env={name: value}):
        assert outcome.error == "ValueError" and f"{name} is {value!r}" in outcome.message


def test_the_text_of_a_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [
        Note("waits", "gather", "train.py:7", 39.0),
        Note("waits", "gather", "train.py:7", 40.0),
        Note("ended", text="0"),
        Note("runs", "load_batch", "train.py:41"),
        Note("failed", line="train.py:9", text="ValueError: no"),
        Note("moves"),
        Note("left"),
        roll.SILENT,
    ]
    assert roll.in_one_line(notes, 100.0) == (
        "ranks 0, 1 wait in gather (train.py:7) since 60 s; rank 2 ended with code 0; rank 3 runs train.py:41 "
        "(load_batch); rank 4 failed at train.py:9 (ValueError: no); rank 5 continues with other collectives; "
        "rank 6 has left the group; rank 7 shows no sign of life"
    )
    assert "rank 4, which failed" in roll.likely_reason(notes)
    assert "rank 2, which ended before" in roll.likely_reason(notes[:4])
    assert "rank 2, which has not got there yet" in roll.likely_reason([*notes[:2], notes[3]])
    assert "rank 2, which shows no sign of life" in roll.likely_reason([*notes[:2], roll.SILENT])
    assert "the network" in roll.likely_reason(notes[:2])
    uneven = roll.likely_reason([Note("waits", "backward", "train.py:6", 0.0), notes[0], notes[1]])
    assert uneven.startswith(
        "In a training step, rank 0 waits for ranks 1, 2, which have already moved on: look for a collective under"
    )
    assert "for others use `accelerator.join_uneven_inputs`" in uneven
    gone = [notes[0], Note("ended"), Note("ended", line="train.py:9", text="3"), Note("ended")]
    assert roll.in_one_line(gone, 100.0).endswith("; ranks 1, 3 have ended; rank 2 ended with code 3 (train.py:9)")
    assert roll.likely_reason(gone) == (
        "The others wait for rank 2, which ended with code 3 (train.py:9): look there for the reason."
    )
    different = [notes[0], Note("waits", "barrier", "train.py:8", 40.0)]
    assert roll.likely_reason(different).endswith("; `--debug` stops at the first such place.")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert "`--debug` does not compare calls of `torch.distributed` itself" in roll.likely_reason(different)
    many = [Note("waits", "gather", "train.py:7", 0.0)] * 4 + [notes[3], notes[0]]
    assert roll.in_one_line(many, 60.0).startswith("ranks 0-3, 5 wait in gather")


class Written(Notes):
    """Notes that stay here."""

    def __init__(self) -> None:
        self.size, self.notes, self.shown = 2, list[Note](), 0

    def write(self, rank: int, note: Note) -> None:
        self.notes.append(note)


def test_a_wait_is_counted_from_the_last_collective_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look at where a rank is comes some seconds after its collective began."""
    notes = Written()
    watching = watch.HangWatch(notes, 0, limit=60.0, abort=False, device_works=lambda: False)
    monkeypatch.setattr(watch, "collectives_begun", lambda: 7)
    monkeypatch.setattr(watch.place, "signature", lambda thread: (1,))
    monkeypatch.setattr(watch.place, "place_of", lambda thread, stack=False: Place("gather", "train.py:7", True))
    monkeypatch.setattr(watch.time, "time", lambda: 1000.0)
    for now in (100.0, 101.0, 105.0):
        watching._look(now)
    watching._pipe.close()
    assert [(note.kind, note.since) for note in notes.notes] == [("waits", 995.0)]


def test_names_of_a_roll_are_those_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalSGD:
        def __enter__(self) -> None:
            raise ValueError

        __exit__ = None

    try:
        LocalSGD().__enter__()
    except ValueError as error:
        inner = error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
        assert place._name([inner], inner) == "LocalSGD"


def looks(
    monkeypatch: pytest.MonkeyPatch, collectives: Callable[[float], int], seconds: range, **options: Any
) -> Written:
    """What a rank notes that is looked at once a second, on line 9 in a call that does not look like a wait."""
    notes, shown = Written(), list[list[Note]]()
    watching = watch.HangWatch(notes, 0, limit=60.0, abort=False, **options)
    clock = 0.0
    monkeypatch.setattr(watch, "collectives_begun", lambda: collectives(clock))
    monkeypatch.setattr(watch.place, "signature", lambda thread: (1,))
    monkeypatch.setattr(watch.place, "place_of", lambda thread, stack=False: Place("main", "train.py:9", False))
    monkeypatch.setattr(watch.time, "time", lambda: 1000.0 + clock)
    monkeypatch.setattr(watching, "_show", shown.append)
    for second in seconds:
        clock = float(second)
        watching._look(clock)
    watching._pipe.close()
    notes.shown = len(shown)
    return notes


@pytest.mark.parametrize("works", [True, False])
def test_a_rank_whose_device_still_works_waits_for_it(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """As in `if loss:` after a collective that NCCL has only begun: the line does not say that it waits."""
    notes = looks(monkeypatch, lambda clock: 7, range(100, 170), device_works=lambda: works)
    assert [note.kind for note in notes.notes] == ["runs", "waits"][: 1 + works]
    assert notes.shown == works
    assert not works or (notes.notes[1].call, notes.notes[1].since) == ("main", 1100.0)


def by_hand(folder: Path, text: str, *worker: str, **environ: str) -> tuple[list[int], list[str]]:
    """Two ranks without a launcher: their exit codes, and what they said. worker: words of a launcher's worker."""
    path = script(folder, START + text)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, *worker, str(path)],
            cwd=folder,
            env=environment(folder) | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize("busy", [0, 1])
def test_abort_ends_all_ranks_also_without_a_launcher(tmp_path: Path, busy: int) -> None:
    text = f"if rank == {busy}:\n    load_batch()\naccelerator.wait_for_everyone()\n"
    codes, said = by_hand(tmp_path, text, **{limits.LIMIT: "2", limits.ACTION: "abort"})
    assert codes == [limits.ABORTED] * 2
    assert said[busy] == "" and "The run ends here" in said[1 - busy]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise ValueError('me')", r"was stopped by an error of rank 1 .* reads: ValueError: me \(train.py:14\)"),
        ("sys.exit(0)", "needed rank 1, which had ended already"),
    ],
)
def test_a_rank_that_is_gone_is_named_on_the_others(tmp_path: Path, text: str, sentence: str) -> None:
    # By hand: a launcher ends the others as soon as one has failed, mostly before they can say anything.
    codes, said = by_hand(tmp_path, f"if rank == 1:\n    {text}\naccelerator.gather(torch.ones(1))\n")
    assert codes[0] == 1
    assert re.search(rf"Rank 0 on .* {sentence}", said[0]), said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sys.exit(3)", r"which had ended already with code 3 \(train.py:14\): look there for the reason"),
        ("sys.exit('no data')", r"which had ended already with code 1 \(train.py:14\): look there for the reason"),
        ("sys.exit()", r"which had ended already with code 0 \(train.py:14\): look for a loop that is shorter"),
        ("del accelerator", "which had ended already with code 0: look for a loop that is shorter"),
    ],
)
def test_a_rank_that_ended_is_named_with_its_code_and_line(tmp_path: Path, text: str, sentence: str) -> None:
    text = f"if rank == 1:\n    {text}\nelse:\n    accelerator.gather(torch.ones(1))\n"
    _, said = by_hand(tmp_path, text, WORKER, str(os.getpid()), "script")
    assert re.search(f"Rank 0 on .* needed rank 1, {sentence}", said[0]), said


def one_fails_while_the_others_wait(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if accelerator.process_index == rank:
        raise ValueError("I am the first")
    accelerator.gather(torch.ones(1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_notebook_shows_the_error_that_came_first(tmp_path: Path, rank: int) -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from accelerate import notebook_launcher\n"
        "from tests.world.test_hang import one_fails_while_the_others_wait as function\n"
        f"notebook_launcher(function, ({rank},), num_processes=3, use_port='0')\n"
    )
    env = {**environment(tmp_path), "ACCELERATE_USE_CPU": "1"}
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path)
    assert f"Rank {rank} of one_fails_while_the_others_wait failed" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("ValueError: I am the first"), done.stderr


def disagree(kind: str, folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        if kind == "gather":
            accelerator.gather(torch.ones(1))
        if kind == "save_state":
            accelerator.save_state(folder)
        if kind == "load_state":
            accelerator.load_state(folder)
        if kind == "prepare":
            accelerator.prepare(torch.nn.Linear(1, 1))
        if kind == "check_trigger":
            accelerator.check_trigger()
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("kind", ["gather", "save_state", "load_state", "prepare", "check_trigger"])
def test_debug_mode_shows_both_lines(tmp_path: Path, kind: str) -> None:
    outcomes = world_outcomes(disagree, 2, kind, str(tmp_path), env={"ACCELERATE_DEBUG_MODE": "1"})
    for outcome in outcomes:
        assert outcome.error == "DistributedOperationException", outcome
        assert re.search(rf"rank 0: {kind}.* \(test_hang.py:\d+\)", outcome.message), outcome.message
        assert re.search(r"rank 1: wait_for_everyone \(test_hang.py:\d+\)", outcome.message), outcome.message


def gathers_on_two_lines() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
    accelerator.gather(torch.ones(1))


def test_debug_mode_compares_lines_where_the_calls_are_alike() -> None:
    for outcome in world_outcomes(gathers_on_two_lines, 2, env={"ACCELERATE_DEBUG_MODE": "1"}):
        assert outcome.error == "DistributedOperationException"
        first, second = re.findall(r"gather of float32\[1\] \(test_hang.py:(\d+)\)", outcome.message)
        assert int(second) == int(first) + 1
