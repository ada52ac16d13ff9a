"""Functions on several processes: `debug_launcher`, and what `notebook_launcher` checks before it starts anything."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from accelerate import Accelerator, debug_launcher, launchers, notebook_launcher
from accelerate.devices import cuda_start
from accelerate.launchers import LaunchFailed, PrepareForLaunch, _Entry
from accelerate.state import PartialState
from tests.harness import run_world
from tests.harness.world import free_port


def _write_what_i_see(folder: str, factor: int) -> None:
    accelerator = Accelerator()
    mine = torch.tensor([accelerator.process_index * factor])
    # enough work for OpenMP to use threads, if it had any
    (torch.ones(400, 400) @ torch.ones(400, 400)).exp().sort()
    text = f"{accelerator.gather(mine).tolist()} {accelerator.device} {accelerator.mixed_precision}"
    Path(folder, str(accelerator.process_index)).write_text(text)


def test_debug_launcher(tmp_path: Path) -> None:
    (torch.ones(400, 400) @ torch.ones(400, 400)).exp().sort()
    # What a test left behind in this process does not reach the others.
    Accelerator(cpu=True, mixed_precision="bf16")
    debug_launcher(_write_what_i_see, (str(tmp_path), 5), num_processes=3)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["[0, 5, 10] cpu no"] * 3


def _second_fails() -> None:
    if PartialState().process_index == 1:
        raise ValueError("the second one is ill")


def test_debug_launcher_raises_what_a_process_raised() -> None:
    with pytest.raises(ProcessRaisedException) as caught:
        debug_launcher(_second_fails)
    assert "in _second_fails" in str(caught.value) and "ValueError: the second one is ill" in str(caught.value)


def _second_is_killed() -> None:
    if PartialState().process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_second_fails, ["Rank 1 of _second_fails failed", "ValueError: the second one is ill"]),
        (_second_is_killed, ["Rank 1 of _second_is_killed was killed by SIGKILL", "memory"]),
    ],
)
def test_notebook_launcher_says_how_a_rank_ended(
    function: object, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(LaunchFailed) as caught:
        notebook_launcher(function, num_processes=2, use_port="0")  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


def _one_machine(port: str, folder: str) -> None:
    machine = int(os.environ["RANK"])
    notebook_launcher(
        _write_what_i_see, (folder, 3), num_processes=1, num_nodes=2, node_rank=machine, use_port=port,
        master_addr="127.0.0.1", mixed_precision="bf16",
    )  # fmt: skip


def test_notebook_launcher_on_two_machines(tmp_path: Path) -> None:
    run_world(_one_machine, 2, str(free_port()), str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[0, 3] cpu bf16"] * 2


def test_on_one_machine_a_port_in_use_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with socket.create_server(("localhost", 0)) as other:
        port = str(other.getsockname()[1])
        notebook_launcher(_write_what_i_see, (str(tmp_path), 3), num_processes=2, use_port=port)
        assert (tmp_path / "1").read_text() == "[0, 3] cpu no"
        with pytest.raises(ConnectionError, match=f"already listens on port {port}.*another `use_port`"):
            notebook_launcher(print, num_processes=1, num_nodes=2, use_port=port)  # the other looks for it there


def test_one_process_is_this_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    seen = []
    notebook_launcher(lambda: seen.append((os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"])), (), 1, "bf16")
    assert seen == [(os.getpid(), "bf16")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_processes": 0}, "num_processes is 0"),
        ({"mixed_precision": "fp64"}, "mixed_precision is 'fp64': choose one of no, fp8, fp16, bf16"),
        ({"node_rank": 2, "num_nodes": 2}, "node_rank is 2 and num_nodes 2"),
        ({"start_method": "thread"}, "start_method is 'thread'"),
        ({"num_processes": "2"}, "num_processes is '2', but should be a whole number"),
        ({"num_processes": 2.0}, "num_processes is 2.0, but should be a whole number"),
        ({"use_port": "abc"}, "use_port is 'abc', but should be a number such as '29500'"),
        ({"num_nodes": "1"}, "num_nodes is '1', but should be a whole number"),
        ({"args": 0.1}, r"args is 0\.1, but should be a tuple or a list: one argument is written `\(0\.1,\)`"),
        ({"args": "ab"}, "args is 'ab', but should be a tuple or a list"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        notebook_launcher(print, **{"num_processes": 2, **arguments})  # type: ignore[arg-type]


def test_the_result_of_a_function_is_no_function() -> None:
    for launcher in (notebook_launcher, debug_launcher):
        with pytest.raises(TypeError, match=r"The first argument is 0\.5, a float, .* without calling it"):
            launcher(0.5, num_processes=2)  # type: ignore[arg-type]


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from accelerate import notebook_launcher

def wait(parent):
    Path(os.environ["RANK"]).touch()
    while not (Path("0").exists() and Path("1").exists()):
        time.sleep(0.01)
    while os.environ["RANK"] == "0":
        # Python drops an interrupt that comes while its hooks after a fork run: then it is sent again.
        time.sleep(0.5)
        os.kill(parent, signal.SIGINT)
        time.sleep(10)
    time.sleep(600)

try:
    notebook_launcher(wait, (os.getpid(),), num_processes=2, use_port="0")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_is_that_of_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    assert done.stdout.splitlines()[-1] == "interrupted", done.stderr


ALIKE = """
import os, signal, sys, time, warnings
from pathlib import Path
from accelerate import PartialState, notebook_launcher

def train(folder):
    rank = PartialState().process_index
    warnings.simplefilter("always")
    for _ in range(2):
        warnings.warn("heard by all")
    warnings.warn(f"from {rank}")
    # Neither is ended before it could say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, str(rank)).touch()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    raise ValueError("for all of us")

if __name__ == "__main__":
    notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port="0", start_method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_all_processes_of_a_notebook_say_comes_once(method: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "tmp").mkdir()
    script = tmp_path / "cell.py"
    script.write_text(ALIKE)
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "there"), method],
        capture_output=True, text=True, timeout=200, env=environ,
    )  # fmt: skip
    # A warning comes as often as one rank gives it.
    assert [done.stderr.count(f"Warning: {text}") for text in ("heard by all", "from 0", "from 1")] == [2, 1, 1]
    assert "Ranks 0, 1 of train failed:" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("ValueError: for all of us")
    assert not list((tmp_path / "tmp").glob("accelerate-*"))


def test_an_accelerator_that_exists_already_is_refused() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="already been created in this notebook"):
        notebook_launcher(print, num_processes=2)


def test_a_trial_on_one_process_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    kept = []

    def train(folder: str) -> None:
        kept.append(Accelerator())
        _write_what_i_see(folder, 3)

    notebook_launcher(train, (str(tmp_path),), num_processes=1)
    assert (tmp_path / "0").read_text() == "[0] cpu no"
    notebook_launcher(train, (str(tmp_path),), num_processes=2, mixed_precision="bf16", use_port="0")
    assert (tmp_path / "1").read_text() == "[0, 3] cpu bf16"
    # So it does for another trial, with another precision.
    notebook_launcher(train, (str(tmp_path),), num_processes=1, mixed_precision="bf16")
    assert (tmp_path / "0").read_text() == "[0] cpu bf16"
    # What the trial has made still works here.
    assert kept[0].num_processes == 1
    # One that the notebook itself made does stand in the way.
    PartialState._reset_state()
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="already been created in this notebook"):
        notebook_launcher(print, num_processes=2)


def test_debug_launcher_wants_a_list_of_arguments() -> None:
    with pytest.raises(ValueError, match="args is 5, but should be a tuple or a list"):
        debug_launcher(print, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_processes is '2', but should be a whole number"):
        debug_launcher(print, (), "2")  # type: ignore[arg-type]


def test_the_line_that_starts_cuda_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    # This machine may have no GPU, so the moment of starting is played: torch makes the calls that were put off.
    monkeypatch.setattr(cuda_start, "_stack", None)
    (ours,) = [call for call, _ in torch.cuda._queued_calls if call is cuda_start._note]
    ours()  # the line of the user
    place = cuda_start.place()
    assert place is not None and place.startswith(__file__) and place.endswith("`ours()  # the line of the user`")


def test_a_function_travels_by_its_name_or_by_its_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    assert pickle.loads(pickle.dumps(_Entry(_second_fails, False))).function is _second_fails
    pytest.importorskip("cloudpickle", reason="needs cloudpickle, from the test extra")
    space: dict[str, object] = {"__name__": "__main__"}
    exec("def double(x): return 2 * x", space)
    assert pickle.loads(pickle.dumps(_Entry(space["double"], False)))(4) == 8  # type: ignore[arg-type]


def test_a_function_inside_of_another_needs_cloudpickle_to_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "has_package", lambda name: False)
    words = r"send <lambda> to new processes, which cannot import it: install cloudpickle, or define it with `def`"
    with pytest.raises(ValueError, match=words):
        notebook_launcher(lambda: None, num_processes=2, start_method="spawn")
    pytest.importorskip("cloudpickle", reason="needs cloudpickle, from the test extra")
    assert pickle.loads(pickle.dumps(_Entry(lambda x: 2 * x, False)))(4) == 8


LINES = """
from accelerate import PartialState, debug_launcher


def say():
    PartialState().wait_for_everyone()
    for number in range(1000):
        print("a line", "of", "several", "words", number, "end")


debug_launcher(say)
"""


def test_lines_of_debug_launcher_are_whole(tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    script.write_text(LINES)
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=unbuffered)
    expected = sorted(2 * [f"a line of several words {number} end" for number in range(1000)])
    # Some releases of torch tell there, before the first of these, which ranks Gloo has connected.
    assert sorted(line for line in said.stdout.splitlines() if "line" in line) == expected, said.stderr


def test_prepare_for_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
    seen = []
    PrepareForLaunch(lambda *args: seen.append((os.environ["RANK"], args)), "MULTI_CPU")(3, "a", "b")
    assert seen == [("3", ("a", "b"))]


def _collect() -> None:
    PartialState()
    gc.collect()


@pytest.mark.timeout(100)
def test_garbage_of_the_parent_does_not_stop_forked_processes() -> None:
    # A store that an earlier launch has left would wait for its thread, in whose place a fork has another one.
    gc.disable()
    try:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
        around: list[Any] = [store]
        around.append(around)
        del store, around
        debug_launcher(_collect)
    finally:
        gc.enable()
