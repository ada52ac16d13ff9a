"""`accelerate launch` for real: what starts, how it fails, and that nothing outlives it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate
from accelerate.commands.launch import launch_command, launch_command_parser
from tests.harness.world import free_port
from tests.unit.commands.terminal import CONTROL_C, Terminal

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
TWO = ["--cpu", "--num_processes", "2", "--main_process_port", "0"]


def environment(folder: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "OMPI_", "SLURM_"))
    }
    return {**kept, "HF_HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text("import json, os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n" + text)
    return str(path)


def launch(folder: Path, *words: str, limit: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *words], capture_output=True, text=True, timeout=limit, env=environment(folder), cwd=folder
    )


def results(text: str) -> list[Any]:
    lines = [line.removeprefix("RESULT ") for line in text.splitlines() if line.startswith("RESULT ")]
    return sorted(json.loads(line) for line in lines)


def wait_for(*paths: Path, limit: float = 120) -> list[int]:
    """Waits until each process has written its number."""
    end = time.monotonic() + limit
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        assert time.monotonic() < end, "the processes have not started"
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def gone(process: int, limit: float = 20) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


WRITE_NUMBER = "open(f'{rank}.pid', 'w').write(f'{os.getpid()}\\n')\n"
STUBBORN = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

TRAIN = """
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator()
state = accelerator.state
total = accelerator.reduce(torch.ones(1), "sum").item()
mine = [accelerator.process_index, accelerator.num_processes, str(state.distributed_type), state.backend,
        accelerator.mixed_precision, total, sys.argv[1:]]
everyone = gather_object([mine])
if accelerator.is_main_process:
    print("RESULT", json.dumps(everyone))
accelerator.end_training()
"""


def test_two_processes_on_the_cpu_train_and_say_so(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        *TWO,
        "--mixed_precision",
        "bf16",
        script(tmp_path, TRAIN),
        "--",
        "--num_processes",
        "9",
        "--signal",
        "1",
    )
    assert done.returncode == 0, done.stderr
    rest = [2, "DistributedType.MULTI_CPU", "gloo", "bf16", 2.0, ["--", "--num_processes", "9", "--signal", "1"]]
    assert results(done.stdout) == [[[0, *rest], [1, *rest]]]
    assert done.stderr.splitlines() == ["accelerate: starting 2 processes, on the CPU, with gloo"]


def test_a_killed_worker_of_a_loader_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    # Of the two connections to it, either may break first, and the signal of its end comes in the middle of the report.
    train = script(
        tmp_path,
        """
import torch
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator
accelerator = Accelerator()
class Fatal(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 9:
            os.kill(os.getpid(), 9)
        return torch.ones(1)
for batch in accelerator.prepare(DataLoader(Fatal(), batch_size=2, num_workers=1)):
    accelerator.gather(batch)
""",
    )
    done = launch(tmp_path, *TWO, train)
    assert done.returncode == 1
    last = done.stderr.rstrip().rpartition("first to fail")[2]
    assert "RuntimeError: DataLoader worker (pid" in last, done.stderr
    assert last.endswith("try fewer workers (`num_workers`), or a smaller `prefetch_factor`.")


def test_the_first_error_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    # Rank 0 notices the failure of rank 1, once that has been written down, and fails of it, as a collective would.
    train = script(
        tmp_path,
        """
def step():
    raise ValueError("rank 1 has had enough")
if rank == 1:
    with open("draft", "w") as file:
        file.write(os.environ["TORCHELASTIC_ERROR_FILE"])
    os.rename("draft", "record")
    step()
while not os.path.exists("record"):
    time.sleep(0.01)
while not os.path.exists(open("record").read()):
    time.sleep(0.01)
raise ConnectionError("lost the other one")
""",
    )
    done = launch(tmp_path, *TWO, "--monitor_interval", "1", train)
    assert done.returncode == 1
    last = done.stderr.split(f"Rank 1 on {socket.gethostname()} was the first to fail")[-1]
    assert last.endswith(" (and 1 more after it), as shown above:\nValueError: rank 1 has had enough\n")
    assert done.stderr.count("in step\n") == 1  # its traceback
    assert "worker.py" not in done.stderr
    assert "torch" not in last
    (tmp_path / "record").unlink()
    quiet = launch(tmp_path, *TWO, "--quiet", train)
    assert "was the first to fail" not in quiet.stderr


def test_the_exit_code_is_kept(tmp_path: Path) -> None:
    done = launch(tmp_path, *TWO, script(tmp_path, "sys.exit(3) if rank == 1 else time.sleep(60)"))
    assert done.returncode == 3
    assert done.stderr.rstrip().endswith("was the first to fail, with exit code 3.")
    leaves = "from accelerate import PartialState\nPartialState()\nif rank == 1:\n    sys.exit(3)\ntime.sleep(60)"
    done = launch(tmp_path, *TWO, script(tmp_path, leaves))
    assert done.stderr.rstrip().endswith("was the first to fail, with exit code 3 (train.py:6).")
    assert launch(tmp_path, "--cpu", script(tmp_path, "sys.exit(7)")).returncode == 7


def test_a_signal_is_named_in_words(tmp_path: Path) -> None:
    train = script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")
    done = launch(tmp_path, *TWO, train)
    assert done.returncode == 128 + signal.SIGKILL
    assert "Rank 1 on" in done.stderr.splitlines()[-1]
    assert "memory ran out: try a smaller batch" in done.stderr.splitlines()[-1]
    alone = launch(tmp_path, "--cpu", script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)"))
    assert alone.returncode == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV: a library accessed invalid memory" in alone.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children of a killed process")
@pytest.mark.parametrize("count", [1, 2])
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, count: int) -> None:
    train = script(tmp_path, STUBBORN + WRITE_NUMBER + "time.sleep(120)")
    words = ["--cpu"] if count == 1 else TWO
    launcher = subprocess.Popen([*LAUNCH, *words, train], env=environment(tmp_path), cwd=tmp_path)
    try:
        numbers = wait_for(*(tmp_path / f"{rank}.pid" for rank in range(count)))
    finally:
        launcher.kill()
        launcher.wait()
    assert all(gone(number) for number in numbers)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children of a killed process")
@pytest.mark.parametrize(("count", "number"), [(1, signal.SIGKILL), (1, signal.SIGTERM), (2, signal.SIGKILL)])
def test_nothing_that_a_shell_script_has_started_outlives_the_launcher(
    tmp_path: Path, count: int, number: signal.Signals
) -> None:
    train = script(tmp_path, STUBBORN + WRITE_NUMBER + "time.sleep(120)")
    words = ["--cpu"] if count == 1 else TWO
    shell = ["--no_python", "sh", "-c", f"{sys.executable} {train}; true"]
    launcher = subprocess.Popen([*LAUNCH, *words, *shell], env=environment(tmp_path), cwd=tmp_path)
    try:
        numbers = wait_for(*(tmp_path / f"{rank}.pid" for rank in range(count)))
    finally:
        launcher.send_signal(number)
        launcher.wait()
    assert launcher.returncode in (-number, 128 + number)
    assert all(gone(number) for number in numbers)


@pytest.mark.parametrize("count", [1, 2])
def test_control_c_ends_everything_also_what_does_not_want_to(tmp_path: Path, count: int) -> None:
    train = script(tmp_path, STUBBORN + WRITE_NUMBER + "time.sleep(120)")
    words = ["--cpu"] if count == 1 else TWO
    terminal = Terminal(
        ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), *LAUNCH, *words, train], environment(tmp_path)
    )
    try:
        numbers = wait_for(*(tmp_path / f"{rank}.pid" for rank in range(count)))
        terminal.send(CONTROL_C)
        if count > 1:
            terminal.wait_for("The run was ended by SIGINT: it was interrupted.")
        code = terminal.process.wait(timeout=60)
    finally:
        terminal.close()
    assert code != 0
    assert all(gone(number) for number in numbers)


def test_a_request_to_end_reaches_the_script(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "def end(*_):\n    open('ended', 'w').close()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + WRITE_NUMBER + "time.sleep(120)",
    )
    launcher = subprocess.Popen([*LAUNCH, "--cpu", train], env=environment(tmp_path), cwd=tmp_path)
    wait_for(tmp_path / "0.pid")
    launcher.terminate()
    assert launcher.wait(timeout=60) == 0
    assert (tmp_path / "ended").exists()


def test_restarts_and_files_of_output(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, flush=True)\n"
        "open(f'{attempt}-{rank}', 'w').close()\n"
        "while not os.path.exists(f'{attempt}-{1 - rank}'): time.sleep(0.01)\n"  # the first to fail ends the other
        "sys.exit(0 if attempt == '1' else 1)",
    )
    words = ["--max_restarts", "1", "--tee", "3", "--log_dir", str(tmp_path / "logs"), "--rdzv_backend", "c10d"]
    done = launch(tmp_path, *TWO, *words, train)
    assert done.returncode == 0, done.stderr
    assert "attempt 1" in done.stdout
    written = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted(written) == ["attempt 0\n"] * 2 + ["attempt 1\n"] * 2
    (folder,) = (tmp_path / "logs").iterdir()
    assert re.match(r"\d{8}-\d{6}-\d+_", folder.name)  # when it began


def test_restarts_and_files_of_output_of_one_process(tmp_path: Path) -> None:
    text = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt)
sys.exit(3 if attempt < 2 else 0)
"""
    words = ["--num_processes", "1", "--main_process_port", "0", "--max_restarts", "2", "--tee", "3"]
    done = launch(tmp_path, "--cpu", *words, "--log_dir", str(tmp_path / "logs"), script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))] == [
        f"attempt {number}\n" for number in range(3)
    ]
    assert "accelerate: attempt 3 of 3, after rank 0 failed with SystemExit: 3" in done.stderr
    killed = text.replace("sys.exit(3", "os.kill(os.getpid(), 9) if attempt < 2 else sys.exit(3")
    failed = launch(tmp_path, "--cpu", *words[:4], "--max_restarts", "1", script(tmp_path, killed))
    assert failed.returncode == 137 and failed.stdout.count("attempt") == 2
    assert "accelerate: attempt 2 of 2, after rank 0 was killed by SIGKILL" in failed.stderr


def test_a_restart_names_the_rank_that_failed_and_not_the_one_that_was_ended(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        """
if rank == 1:
    raise ValueError("a broken sample\\n  sample: 7\\nskip it")
time.sleep(100)
""",
    )
    done = launch(tmp_path, *TWO, "--max_restarts", "1", "--tee", "1", "--log_dir", str(tmp_path / "logs"), train)
    assert done.returncode == 1
    assert "accelerate: attempt 2 of 2, after rank 1 failed with ValueError: a broken sample\n" in done.stderr
    # All lines of the message are repeated at the end, indented ones as well.
    end = done.stderr.split("as shown above:\n")[-1]
    assert end == "ValueError: a broken sample\n  sample: 7\nskip it\n"
    written = [path.name for path in (tmp_path / "logs").rglob("*")]
    assert "stdout.log" in written and not [name for name in written if "said" in name]


def test_a_folder_for_files_of_output_that_nobody_asked_for_is_not_made(tmp_path: Path) -> None:
    train = script(tmp_path, "print('RESULT', os.environ.get('TORCHELASTIC_RUN_ID'))")
    for words in (TWO, ["--cpu", "--num_processes", "1"]):
        done = launch(tmp_path, *words, "--log_dir", str(tmp_path / "logs"), train)
        assert done.returncode == 0 and "add `--tee 3`" in done.stderr, done.stderr
        assert not (tmp_path / "logs").exists()


def _fails(text: str) -> str:
    return (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two, self.kind = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), 'a'\n"
        "    def forward(self, batch): return self.one(batch)\n"
        "class Again(Model):\n"
        "    def forward(self, batch):\n"
        "        again = torch.utils.checkpoint.checkpoint\n"
        "        return sum(again(self.one, batch, use_reentrant=True) for _ in range(2))\n"
        "model = accelerator.prepare(Model())\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + text
    )


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("model.kind", "`accelerator.unwrap_model(model)`"),
        (
            "for _ in range(2): accelerator.backward(model(torch.ones(1, 2)).sum())",
            "`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])`",
        ),
        (
            "again = accelerator.prepare(Again())\n"
            "accelerator.backward(again(torch.ones(1, 2, requires_grad=True)).sum())",
            "`use_reentrant=False`",
        ),
    ],
)
def test_errors_of_torch_about_ddp_say_what_to_do_with_this_package(tmp_path: Path, text: str, remedy: str) -> None:
    done = launch(tmp_path, *TWO, script(tmp_path, _fails(text)))
    assert done.returncode == 1
    assert remedy in done.stderr.splitlines()[-1], done.stderr
    # Each rank names itself in the second of them; it is one error nevertheless.
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "Ranks 0, 1 on " in done.stderr


def test_a_save_that_one_rank_breaks_is_told_as_its_error(tmp_path: Path) -> None:
    text = (
        "class Own:\n"
        "    def state_dict(self):\n"
        "        if accelerator.process_index == 1: raise ValueError('no state')\n"
        "        return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "accelerator.register_for_checkpointing(Own())\n"
        "accelerator.save_state('run')\n"
    )
    done = launch(tmp_path, *TWO, script(tmp_path, _fails(text)))
    assert done.returncode == 1
    last = done.stderr.rpartition("\n\n")[2].splitlines()
    assert last[0].startswith("Rank 1 on ") and last[-1] == "ValueError: no state", done.stderr
    told = next(line for line in done.stderr.splitlines() if " was stopped by an error of rank 1 on " in line)
    assert "which reads: ValueError: no state (train.py:" in told


@pytest.mark.parametrize(("backend", "asked"), [("static", False), ("c10d", False), ("static", True)])
def test_a_port_that_is_taken_after_it_was_chosen(tmp_path: Path, backend: str, asked: bool) -> None:
    """Of two launches that start together, both find 29500 free; here the other one is already there."""
    train = script(tmp_path, "print('RESULT', json.dumps([rank, os.environ['WORLD_SIZE']]))")
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        here = f"--master_port={port}" if backend == "static" else f"--rdzv_endpoint=127.0.0.1:{port}"
        words = ["--nnodes=1", "--nproc_per_node=2", f"--rdzv_backend={backend}", here, train]
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.launch.elastic", *([] if asked else ["--any_port"]), *words],
            capture_output=True, text=True, timeout=200, env=environment(tmp_path), cwd=tmp_path,
        )  # fmt: skip
    if asked:
        assert done.returncode == 1
        assert done.stderr.strip().count("\n") == 0
        assert f"already listens on port {port}" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert results(done.stdout) == [[0, "2"], [1, "2"]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, which can leave the working folder out")
def test_modules_in_the_working_folder_are_not_those_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    train = script(tmp_path / "there", "import queue\nprint('RESULT', json.dumps([rank, queue.Queue.__name__]))")
    for name in ("queue", "types", "accelerate"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not me')\n")
    start = [str(Path(sys.executable).with_name("accelerate")), "launch", *TWO, train]
    done = subprocess.run(start, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == [[0, "Queue"], [1, "Queue"]]


ABOUT = """
main = sys.modules["__main__"]
import multiprocessing
class Thing: pass
def who(queue):
    queue.put([__name__, type(Thing()).__module__])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=who, args=(queue,))
    child.start()
    spawned = queue.get()
    child.join()
    about = [__name__, __file__, __package__ or None, __doc__, sys.argv, sys.path[0], main.__dict__ is globals(),
             type(__loader__).__name__]
    print("RESULT", json.dumps([*about, spawned]), flush=True)
"""


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_worker_runs_a_script_as_python_does(tmp_path: Path, kind: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    path = script(tmp_path / "package", ABOUT)
    words = [path, "a", "--b"] if kind == "script" else ["-m", "package.train", "a", "--b"]
    plain = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path
    )
    launched = launch(tmp_path, *TWO, *words)
    assert launched.returncode == 0, launched.stderr
    assert results(launched.stdout) == results(plain.stdout) * 2


def test_a_file_of_a_package_that_is_run_as_a_script_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", "from . import model\n")
    done = launch(tmp_path, *TWO, "package/train.py")
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith(": launch it as a module: `accelerate launch -m package.train`.")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_several_processes_stay_whole_and_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    train = script(
        tmp_path,
        "for number in range(1500): print('RESULT', [number, 'x' * 60], sep=' ')\n"
        "os.kill(os.getpid(), signal.SIGKILL)",  # nothing is written at the end
    )
    printed = launch(tmp_path, *TWO, train).stdout.splitlines()
    assert set(printed) <= {f"RESULT {[number, 'x' * 60]}" for number in range(1500)}
    # The first one to die may have taken the other one along.
    assert len(printed) >= 1500 and f"RESULT {[1499, 'x' * 60]}" in printed


def test_a_program_that_is_not_python(tmp_path: Path) -> None:
    program = tmp_path / "run.sh"
    program.write_text('#!/bin/sh\necho "RESULT [\\"$RANK\\", \\"$1\\"]"\n')
    program.chmod(0o755)
    assert results(launch(tmp_path, *TWO, "--no_python", str(program), "x").stdout) == [["0", "x"], ["1", "x"]]
    assert results(launch(tmp_path, "--cpu", "--no_python", str(program), "x").stdout) == [["", "x"]]


def test_one_process_gets_its_arguments_and_variables(tmp_path: Path) -> None:
    told = (
        "print('RESULT', json.dumps([sys.argv[1:], os.environ['ACCELERATE_MIXED_PRECISION'], os.environ.get('RANK')]))"
    )
    done = launch(tmp_path, "--cpu", "--mixed_precision", "fp16", script(tmp_path, told), "--cpu", "--", "a b")
    assert results(done.stdout) == [[["--cpu", "--", "a b"], "fp16", None]]
    assert done.stderr == ""


def parsed(*words: str) -> argparse.Namespace:
    return launch_command_parser().parse_args(list(words))


def test_in_process_it_returns_when_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train = script(tmp_path, "open(f'{rank}.done', 'w').close(); sys.exit(len(sys.argv) - 1)")
    assert launch_command(parsed(*TWO, train)) is None
    assert (tmp_path / "0.done").exists()
    assert (tmp_path / "1.done").exists()
    with pytest.raises(subprocess.CalledProcessError) as failure:
        launch_command(parsed("--cpu", train, "a", "b"))
    assert failure.value.returncode == 2


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRTE_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ["--cpu", "--num_processes", "2", "--mpirun_hostfile", "hosts", "--main_process_port", "0"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LAUNCH, *words, *more],
            capture_output=True,
            text=True,
            timeout=200,
            env={**environment(tmp_path), **root},
            cwd=tmp_path,
        )

    done = run("--mixed_precision", "bf16", script(tmp_path, TRAIN))
    assert done.returncode == 0, done.stderr
    rest = [2, "DistributedType.MULTI_CPU", "gloo", "bf16", 2.0, []]
    assert results(done.stdout) == [[[0, *rest], [1, *rest]]]
    failing = "raise ValueError('no') if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else time.sleep(60)"
    failed = run(script(tmp_path, failing))
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("ValueError: no")
    assert f"Rank 1 on {socket.gethostname()} was the first to fail:" in failed.stderr


def test_a_config_file_of_fsdp_shards_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_version: 1\n"
    )
    train = script(
        tmp_path,
        """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
here = sum(parameter.numel() for parameter in model.parameters())
print("RESULT", json.dumps([str(accelerator.distributed_type), here]), flush=True)
accelerator.end_training()
""",
    )
    done = launch(tmp_path, "--cpu", "--main_process_port", "0", "--config_file", str(tmp_path / "fsdp.yaml"), train)
    assert results(done.stdout) == [["DistributedType.FSDP", 10]] * 2, done.stderr


def test_a_script_that_cannot_be_read_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f(:\n")
    done = launch(tmp_path, *TWO, "train.py")
    assert done.returncode == 1
    assert done.stderr.count("def f(:") == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"


def test_what_all_ranks_say_is_on_the_screen_once(tmp_path: Path) -> None:
    # A rank that is slower than the other is told to end, and has its error all the same.
    meet = "open(f'{rank}-there', 'w').close()\nwhile not os.path.exists(f'{1 - rank}-there'): pass\n"
    train = script(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{meet}")
    with open(train, "a") as file:
        file.write("import warnings\nwarnings.simplefilter('always')\n")
        file.write("for _ in range(2): warnings.warn('heard by all')\nwarnings.warn(f'from {rank}')\n")
        file.write("sys.stdout.write(f'{rank} {os.environ.get(\"TORCH_CPP_LOG_LEVEL\")}\\n')\n")
        file.write("raise ValueError('for all of us')\n")
    done = launch(tmp_path, *TWO, train)
    assert done.returncode == 1
    # By the first rank as it happens; the launcher names all ranks as the last thing.
    assert done.stderr.count("Traceback") == 1, done.stderr
    last, error = done.stderr.splitlines()[-2:]
    assert last.startswith("Ranks 0, 1 on ") and last.endswith(" failed in the same way, as shown above:")
    assert error == "ValueError: for all of us"
    # What torch's own code warns of, past Python, is left to the first.
    assert sorted(done.stdout.splitlines()) == ["0 None", "1 ERROR"]
    # A warning comes as often as one rank gives it.
    assert [done.stderr.count(f"Warning: {text}") for text in ("heard by all", "from 0", "from 1")] == [2, 1, 1]


def test_an_error_that_all_ranks_raise_is_one_however_deep_in_the_package_each_met_it(tmp_path: Path) -> None:
    """Rank 0 alone looks at the folder of a checkpoint, and all refuse to save. In debug mode they are at two lines."""
    text = """
from accelerate.errors import CheckpointError, DistributedOperationException
import accelerate.text as package
open(f"{rank}-there", "w").close()
while not os.path.exists(f"{1 - rank}-there"): pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "def refuse(deep):\\n    if deep: refuse(False)\\n    raise CheckpointError('no folder')"
exec(compile(code, package.__file__, "exec"))
"""
    disagree = "text = 'rank 0: one; rank 1: two'\nif rank: raise DistributedOperationException(text)\n"
    disagree += "raise DistributedOperationException(text)"
    for way in ("refuse(rank == 0)", disagree):
        done = launch(tmp_path, *TWO, script(tmp_path, text + way))
        assert done.stderr.count("Traceback") == 1, done.stderr
        assert done.stderr.splitlines()[-2].startswith("Ranks 0, 1 on "), done.stderr
        for path in tmp_path.glob("*-there"):
            path.unlink()


SECOND = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", "1"]


def test_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """The processes find the package where the launcher has: in the working folder."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    # What is installed besides; a `.pth` of it, by which this package may be installed, is not followed from here.
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    text = script(tmp_path, "print('RESULT', json.dumps(rank))")  # which is in another folder, and would not find it
    command = [python, "-m", "accelerate.commands.launch", *TWO, text]
    folder = Path(accelerate.__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment(tmp_path), cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == [0, 1]


def test_an_address_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    words = [*SECOND, "--main_process_ip", "no.such.host.invalid", "--rdzv_conf", "timeout=2"]
    done = launch(tmp_path, *words, script(tmp_path, ""))
    assert done.returncode == 1
    assert "the address 'no.such.host.invalid' cannot be found" in done.stderr, done.stderr
    assert "The address 'no.such.host.invalid' of the machine with rank 0 cannot be found" in done.stderr, done.stderr
    assert "frame #" not in done.stderr


def test_a_machine_that_does_not_answer_is_named_while_it_is_awaited(tmp_path: Path) -> None:
    words = [*SECOND, "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    done = launch(tmp_path, *words, "--rdzv_conf", "timeout=11", script(tmp_path, ""))
    assert done.returncode == 1
    assert "waiting for the machine with rank 0 at 127.0.0.1:" in done.stderr, done.stderr
    assert "Nothing has answered at 127.0.0.1:" in done.stderr and "frame #" not in done.stderr


def test_the_first_machine_says_that_it_waits_for_others(tmp_path: Path) -> None:
    words = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", "0"]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), script(tmp_path, "")]
    with subprocess.Popen(
        [*LAUNCH, *words], stderr=subprocess.PIPE, text=True, env=environment(tmp_path), cwd=tmp_path
    ) as launcher:
        assert launcher.stderr is not None
        assert any("waiting for one more machine to join at 127.0.0.1:" in line for line in launcher.stderr)
        launcher.terminate()
        launcher.stderr.read()
