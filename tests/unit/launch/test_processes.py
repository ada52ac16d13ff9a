"""Processes that end together, signals in words, and what is written down of a failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.launch import failure, processes
from accelerate.launch.engines.single import PROGRAM, WORKER


def test_signals_in_words() -> None:
    assert "most often by the kernel because memory ran out: try" in processes.signal_in_words(signal.SIGKILL)
    assert "killed by the kernel because memory ran out" in processes.signal_in_words(signal.SIGKILL, memory_kills=1)
    assert "/dev/shm" in processes.signal_in_words(signal.SIGBUS)
    assert "SIGUSR1" in processes.signal_in_words(signal.SIGUSR1)
    assert processes.signal_in_words(250) == "was ended by signal 250"


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_codes_are_those_of_a_shell(returncode: int, code: int) -> None:
    assert processes.exit_code(returncode) == code


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert processes.supervise([sys.executable, "-c", "raise SystemExit(5)"], os.environ) == 5
    assert signal.getsignal(signal.SIGTERM) is before


HANDLER_IN_C = """
#include <signal.h>
#include <unistd.h>
static void hear(int number) { write(1, "heard in C\\n", 11); }
__attribute__((constructor)) static void install(void) { signal(SIGUSR1, hear); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")
def test_a_handler_that_c_code_installed_stays_its_own(tmp_path: Path) -> None:
    """As a profiler that is loaded before Python starts: Python can neither show such a handler nor put it back."""
    library = tmp_path / "handler.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=HANDLER_IN_C, text=True, check=True)
    program = """
import os, signal, sys
from accelerate.launch import processes
del os.environ["LD_PRELOAD"]
assert signal.getsignal(signal.SIGUSR1) is None
before = signal.getsignal(signal.SIGTERM)
print("ended", processes.supervise([sys.executable, "-c", "raise SystemExit(5)"], os.environ), flush=True)
assert signal.getsignal(signal.SIGTERM) is before
signal.raise_signal(signal.SIGUSR1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": str(library)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ended 5\nheard in C\n"), done.stderr


def test_descendants_are_found_and_killed() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    program = f"""
import subprocess, sys, time
from accelerate.launch import program
child = subprocess.Popen([sys.executable, "-c", {code!r}], stdin=subprocess.PIPE)
while len(program.descendants()) < 2:
    time.sleep(0.01)
program.signal_descendants()
print(child.wait())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "-9", done.stderr


def worker(folder: Path, text: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, WORKER, "0", "script", str(folder / "script.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def test_a_failure_is_written_down_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "failures"
    folder.mkdir()
    for rank in ("1", "0"):
        done = worker(tmp_path, "raise ValueError('no')", RANK=rank, ACCELERATE_FAILURES=str(folder))
        assert done.returncode == 1
    (folder / "2.json").write_text("{half of it")
    first = failure.first_in(str(folder))
    assert first is not None
    assert first["rank"] == "1"
    assert first["py_callstack"] == done.stderr
    assert done.stderr.splitlines()[1].strip() == f'File "{tmp_path / "script.py"}", line 1, in <module>'


def test_an_exit_code_is_written_down_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert worker(tmp_path, "raise SystemExit(3)", TORCHELASTIC_ERROR_FILE=str(path)).returncode == 3
    written = failure.details(json.loads(path.read_text()))
    assert written["py_callstack"] == ""
    assert written["time"] > 0
    path.unlink()
    assert worker(tmp_path, "raise SystemExit(0)", TORCHELASTIC_ERROR_FILE=str(path)).returncode == 0
    assert not path.exists()


def test_torch_reads_it_too(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    worker(tmp_path, "raise ValueError('no')", TORCHELASTIC_ERROR_FILE=str(path))
    assert ProcessFailure(0, 1, 1, str(path)).error_file_data["message"]["message"] == "ValueError: no"
    assert ProcessFailure(0, 1, 1, str(path)).timestamp > 0
    assert failure.details(json.loads(path.read_text()))["py_callstack"].endswith("ValueError: no\n")


def test_what_somebody_else_wrote_has_no_details() -> None:
    assert failure.details(None) == failure.details({"message": "text"}) == failure.details([]) == {}


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("import sys; sys.exit(4)", 4, ""),
        ("import sys; sys.exit('a sentence')", 1, "a sentence\n"),
        ("raise KeyboardInterrupt", 130, ""),
        (
            "import sys; sys.excepthook = lambda *about: print('mine', about[0].__name__, file=sys.stderr); 1 / 0",
            1,
            "mine ZeroDivisionError\n",
        ),
    ],
)
def test_how_a_script_ends_is_how_the_worker_ends(tmp_path: Path, text: str, code: int, error: str) -> None:
    done = worker(tmp_path, text)
    assert (done.returncode, done.stderr) == (code, error)


def test_scripts_of_any_name_and_folders(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("word = 'found'")
    (tmp_path / "program").write_text("import helper; print(helper.word, __name__)")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("print('in a folder', __name__)")
    for target, expected in (("program", "found __main__"), ("folder", "in a folder __main__")):
        command = [sys.executable, WORKER, "0", "script", str(tmp_path / target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    command = [sys.executable, WORKER, "1", "script", str(marker)]
    assert subprocess.run(command).returncode == 1
    command = [sys.executable, PROGRAM, "1", "touch", str(marker)]
    assert subprocess.run(command).returncode == 1
    assert not marker.exists()


@pytest.mark.parametrize(("words", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15)])
def test_how_a_program_ends_is_how_its_keeper_ends(words: str, code: int) -> None:
    assert subprocess.run([sys.executable, PROGRAM, "0", "sh", "-c", words]).returncode == code


@pytest.mark.parametrize(
    ("ending", "outcome"), [("raise KeyboardInterrupt", "interrupted"), ("sys.exit(0)", "ended 0")]
)
def test_control_c_reaches_the_caller_when_the_child_has_ended(ending: str, outcome: str) -> None:
    handler = f"import signal, sys, time\ndef stop(*_): {ending}\nsignal.signal(signal.SIGINT, stop)\n"
    child = handler + "print(flush=True)\ntime.sleep(60)"
    program = f"""
import os, sys
from accelerate.launch import processes
try:
    print("ended", processes.supervise([sys.executable, "-c", {child!r}], os.environ))
except KeyboardInterrupt:
    print("interrupted")
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=60)[0].strip() == outcome


def test_control_c_ends_a_run_whose_screen_is_gone() -> None:
    """As that of `accelerate launch ... | head`, while torch waits for other machines and hears no signal."""
    text = (
        "import os, signal, threading, time\n"
        "from accelerate.launch import elastic, processes\n"
        "processes.GRACE = 0.0\n"
        "elastic._limit_interrupts(threading.Event())\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.close(2)\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=120).returncode == 128 + signal.SIGINT
