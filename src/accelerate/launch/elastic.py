"""Runs torch elastic, as `python -m torch.distributed.run` does, and makes its failures readable.

`accelerate launch` becomes this process when there are several to start. It is the only part of launching that imports
torch, since torch elastic is part of it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate.config.environment import parse_flag_from_env
from accelerate.config.preemption import NOTE, PREEMPTED
from accelerate.diagnosis.limits import ABORTED
from accelerate.launch import processes, program
from accelerate.launch.engines.single import PROGRAM, WORKER
from accelerate.launch.failure import details, say
from accelerate.launch.meeting import PortTaken, meeting_point
from accelerate.launch.scratch import scratch_folder
from accelerate.launch.waiting import NobodyThere, check_own, saying_who_is_awaited, wait_for_main

# In front of the words for the script.
_SHIELD = "\0"
# Words for this module, before those for torchrun.
_OWN = ("--quiet", "--any_port")
# What ranks end by when others have failed, or with the whole run.
_CONSEQUENCES = (signal.SIGABRT, signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    """Runs the processes to their end; returns the exit code of the first that failed."""
    words = sys.argv[1:] if argv is None else argv
    own = list(takewhile(_OWN.__contains__, words))
    with scratch_folder() as folder:
        return _run(words[len(own) :], own, folder)


def _run(words: list[str], own: list[str], folder: Path) -> int:
    quiet = "--quiet" in own
    program.adopt_orphans()
    said = threading.Event()
    _limit_interrupts(said)
    kills = processes.out_of_memory_kills()

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    if not parse_flag_from_env("ACCELERATE_DEBUG_MODE"):
        # Its report of a failure says less than ours, and hides it.
        logging.disable(logging.CRITICAL)
    # Its parser would take a `--` of the script for its own, and an option that begins as some of its own for unclear.
    script = next(place for place, word in enumerate(words) if not word.startswith("--")) + 1
    shielded = [*words[:script], *(_SHIELD + word for word in words[script:])]
    arguments = torchrun.get_args_parser().parse_args(shielded)
    if arguments.master_port is None:
        arguments.master_port = 29500
    if arguments.log_dir is None and arguments.tee == "0":
        arguments.log_dir = str(folder / "logs")  # torch elastic keeps files of its own, and would leave them
    config, command, command_args = torchrun.config_from_args(arguments)
    if config.max_nodes == 1 and config.run_id == "none":  # several machines would have to agree on a name
        config.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # of the folder in `--log_dir`
    command_args = [word.removeprefix(_SHIELD) for word in command_args]
    command, command_args = _through_worker(arguments, str(command), command_args)
    note = folder / "preempted"
    os.environ[NOTE] = f"{os.getpid()}:{note}"
    ended = _note_ends(folder)
    endpoint = config.rdzv_endpoint
    signal.signal(signal.SIGUSR1, _pass_on)  # as torch elastic does with SIGTERM
    try:
        with _listening(config, "--any_port" in own, arguments.node_rank):
            elastic_launch(config=config, entrypoint=command)(*command_args)
        return 0
    except (PortTaken, NobodyThere) as problem:
        print(f"accelerate launch: {problem}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:  # before torch elastic listens to signals
        return 128 + signal.SIGINT
    except ChildFailedError as failure:
        if note.exists():
            return PREEMPTED
        teed = arguments.tee in ("2", "3")  # so that errors are on the screen, too
        return _report(failure, quiet, processes.out_of_memory_kills() - kills, teed, ended)
    except SignalException as stopped:
        number = int(stopped.sigval)
        if note.exists():
            return PREEMPTED  # the ranks have said what they did
        said.set()
        _say(f"The run {processes.signal_in_words(number)}.")
        return 128 + number
    except RendezvousError as problem:
        _say(f"{_host()} could not meet the other machines at {endpoint}: {problem}")
        return 1
    finally:
        program.signal_descendants()


@contextmanager
def _listening(config: Any, any_port: bool, node_rank: int) -> Iterator[None]:
    """Takes the port where the processes meet, on the machine that has to listen there."""
    if config.rdzv_backend not in ("static", "c10d"):
        yield
        return
    one_machine = config.max_nodes == 1
    if one_machine or config.rdzv_backend == "static":
        listens = one_machine or config.rdzv_configs["rank"] == 0
    else:
        from accelerate.launch import rendezvous

        listens = rendezvous.settle(config, node_rank)
    endpoint, port = config.rdzv_endpoint.rsplit(":", 1)
    host = endpoint.strip("[]")  # around an address of IPv6, which only a port behind it needs
    limit = float(config.rdzv_configs.get("timeout", 900))
    if listens:
        if not one_machine:
            check_own(host, limit)
        with meeting_point(int(port), any_port) as taken:
            config.rdzv_endpoint = f"{endpoint}:{taken}"
            others = config.min_nodes - 1
            with nullcontext() if others == 0 else saying_who_is_awaited(host, taken, others):
                yield
    else:
        wait_for_main(host, int(port), limit)
        yield


def _through_worker(arguments: Any, command: str, words: list[str]) -> tuple[str, list[str]]:
    """The command of a worker, run by our own first lines (see worker.py and program.py)."""
    parent = str(os.getpid())
    if arguments.no_python:
        return sys.executable, ["-I", "-S", PROGRAM, parent, command, *words]
    # Unbuffered, two processes that print to one place cut each other's lines into pieces; see `worker.print_lines`.
    words = words[1:] if words[:1] == ["-u"] else words
    kind, words = ("module", words[1:]) if arguments.module else ("script", words)
    return command, [WORKER, parent, kind, *words]


def _note_ends(folder: Path) -> dict[int, int]:
    """Has torch elastic write down which ranks have ended, before it ends those that are left; and wait for these.

    Of the last attempt they are in what is returned, by their rank, with their exit codes. Who was killed leaves no
    word, and the attempt after says why there is one: the folder has a file for it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

    ended: dict[int, int] = {}
    end_those_left: Any = SubprocessContext.close

    def close(self: Any, *args: Any, **kwargs: Any) -> None:
        # It is called again when those that were left have ended, by a signal: of that, none of them is the cause.
        again, self.was_closed = getattr(self, "was_closed", False), True
        if isinstance(sys.exc_info()[1], SignalException):  # another one would cut short what the ranks do at their end
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
        if not again:
            codes = {rank: handler.proc.poll() for rank, handler in sorted(self.subprocess_handlers.items())}
            ended.clear()
            ended.update({int(self.envs[rank]["RANK"]): code for rank, code in codes.items() if code is not None})
            for rank, code in ended.items():
                if code < 0 and -code not in _CONSEQUENCES:
                    note = folder / f"killed-{self.envs[0]['TORCHELASTIC_RESTART_COUNT']}"  # see `worker.say_attempt`
                    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
                    note.write_text(f"rank {rank} was killed by {name}", encoding="utf-8")
                    break
        end_those_left(self, *args, **kwargs)

    SubprocessContext.close = close  # type: ignore[method-assign]
    return ended


def _report(failure: Any, quiet: bool, memory_kills: int, teed: bool, ended: dict[int, int]) -> int:
    """Says who failed first and how, as the last thing on the screen. ended: see `_note_ends`."""
    rank, first = min(failure.failures.items(), key=lambda failed: _when(failed[1], failed[0] in ended))
    code = processes.exit_code(first.exitcode)
    if quiet or code == PREEMPTED:  # that was said already
        return code
    who = f"Rank {rank} on {_host()}"
    if first.exitcode < 0:
        _say(f"{who} {processes.signal_in_words(-first.exitcode, memory_kills)}.")
        return code
    traceback = details(first.error_file_data).get("py_callstack")
    failed = {
        number: other
        for number, other in failure.failures.items()
        if other.exitcode != -signal.SIGTERM and (other.exitcode > 0 or number in ended)
    }
    alike = _alike(first, failed) if traceback else {rank}
    others = len(failed.keys() - alike)
    also = f" (and {others} more after it)" if others > 0 else ""
    records = [details(failed[number].error_file_data) for number in alike & failed.keys()]
    shown = all(record.get("said") and (teed or record.get("on_screen")) for record in records)
    if first.exitcode == ABORTED and not details(first.error_file_data):  # else the script has chosen that code
        _say("The run was ended because its ranks waited for each other, as shown above.")
    elif traceback:
        say(alike, _host(), traceback, also, shown=shown)
        _say_who_had_ended(first, traceback, ended)
    else:
        line = details(first.error_file_data).get("line", "")
        _say(f"{who} was the first to fail{also}, with exit code {first.exitcode}{line}.")
    return code


def _say_who_had_ended(first: Any, traceback: str, ended: dict[int, int]) -> None:
    """After an error about a lost connection: who had come to its end, unless the error says so itself."""
    ranks = [str(rank) for rank, code in ended.items() if code == 0]
    if ranks and details(first.error_file_data).get("about_others") and "had ended already" not in traceback:
        print(
            f"Rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on {_host()} had ended before, with code 0: look for a "
            "loop that is shorter there, or a call that only some ranks make.",
            file=sys.stderr,
            flush=True,
        )


def _alike(first: Any, failed: dict[int, Any]) -> set[int]:
    """The ranks that failed as the first one did."""
    record = details(first.error_file_data)
    alike = {
        number for number, other in failed.items() if details(other.error_file_data).get("alike") == record.get("alike")
    }
    # Whose traceback is on the screen may have been ended before it could write its failure down.
    return alike | {int(number) for number in [record.get("said_by", "")] if number}


def _when(process: Any, by_itself: bool = True) -> tuple[int, float]:
    """When a process failed, for sorting. by_itself: it ended before torch elastic began to end those that were left.

    One that a signal killed was there before the others noticed. SIGTERM is what the others are ended with afterwards.
    Torch's own time is that of noticing, in whole seconds: after any time that a worker wrote down itself.
    """
    number = -process.exitcode
    if number > 0 and not by_itself:
        return 2, float(process.timestamp)  # by SIGKILL, if it did not listen to SIGTERM, as one that is stopped
    if number == signal.SIGKILL and os.environ.get("ACCELERATE_PREEMPTION"):
        return 2, float(process.timestamp)  # it had been told to end, and took its time: it listens to SIGTERM
    order = 2 if number == signal.SIGTERM else 0 if number > 0 and number not in _CONSEQUENCES else 1
    return order, float(details(process.error_file_data).get("time", process.timestamp + 1))


def _host() -> str:
    return socket.gethostname()


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


def _pass_on(number: int, frame: FrameType | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number))


def _limit_interrupts(said: threading.Event) -> None:
    """After Ctrl-C the run ends within seconds, whatever its processes do. said: set when the screen says so.

    Every handler that torch elastic installs writes the number of the signal to this pipe first.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(reading, 1)) != bytes([signal.SIGINT]):
            if not number:
                return
        time.sleep(processes.GRACE)
        program.signal_descendants()
        with suppress(OSError):  # the screen may be gone
            if not said.is_set():
                _say(f"The run {processes.signal_in_words(signal.SIGINT)}.")
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
