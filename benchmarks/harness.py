"""The coordinator: keeps the subjects' processes, asks each in turn for a block of steps, takes medians."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PATIENCE = 120.0  # seconds a block or a start may take before its subject counts as failed


class SubjectFailed(RuntimeError):
    """A subject's process raised, died or stopped answering; the message holds what it said."""


def interpreter(name: str) -> str:
    """A Python, as it was typed, that can be started from any folder."""
    return os.path.abspath(shutil.which(name) or name) if name else ""


@dataclass(frozen=True)
class Subject:
    """One of the things compared: who runs it, and which function of the benchmark's module it runs."""

    name: str
    body: str
    python: str
    pythonpath: str = ""

    def environment(self, device: str) -> dict[str, str]:
        """The caller's environment without anything that would steer one of the subjects."""
        foreign = ("ACCELERATE_", "FSDP_", "MASTER_", "TORCHELASTIC_")
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ranks}
        # Installed packages come with bytecode; a source tree must be allowed to write its own.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["OMP_NUM_THREADS"] = "1"
        # Some virtual machines announce AMX and fault on it in the first bf16 product; nothing here needs it.
        env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        if self.pythonpath:
            env["PYTHONPATH"] = self.pythonpath
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
            env["ACCELERATE_USE_CPU"] = "true"
        elif "CUDA_VISIBLE_DEVICES" in os.environ:
            env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        return env


def subjects(peer_python: str) -> dict[str, Subject]:
    """Plain PyTorch and this repository run in the calling interpreter, the peer in its own environment."""
    return {
        "compute": Subject("compute", "compute", sys.executable),
        "plain": Subject("plain", "plain", sys.executable),
        "peer": Subject("peer", "prepared", peer_python),
        "ours": Subject("ours", "prepared", sys.executable, str(REPOSITORY / "src")),
    }


@dataclass(frozen=True)
class Figure:
    """One row: what is run, how often, and what counts as good enough.

    `judge` names what `target` limits: "added" (ours minus baseline over peer minus baseline), "baseline"
    (ours over baseline) or "peer" (ours over peer). Without a target the row only informs.

    beside: the baseline has no process of its own, but runs in those of the others, in turn with them. What is added
    is then no difference between processes, of which one may be slower than another for as long as it lives.
    """

    name: str
    module: str
    judge: str
    target: float | None
    args: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    steps: int = 50
    warmup: int = 20
    rounds: int = 60
    seconds: float = 15.0
    restarts: int = 2
    subjects: tuple[str, ...] = ("plain", "peer", "ours")
    beside: bool = False

    @property
    def baseline(self) -> str:
        return self.subjects[0]

    @property
    def running(self) -> tuple[str, ...]:
        """The subjects that have processes of their own."""
        return self.subjects[1:] if self.beside else self.subjects

    def bodies(self, own: str) -> list[str]:
        """The functions that a subject's processes run in turn."""
        return [self.baseline, own] if self.beside else [own]


@dataclass
class Row:
    """A measured figure, as the table shows it and as the JSON file keeps it."""

    name: str
    cells: dict[str, str]
    compared: str
    target: str
    met: bool | None
    raw: dict[str, Any]


class Process:
    """One worker process and its pipe."""

    def __init__(self, subject: Subject, device: str) -> None:
        self.subject = subject
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `kill`)
        self.popen = subprocess.Popen(
            [subject.python, str(HERE / "worker.py"), subject.body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=subject.environment(device),
            start_new_session=True,
            bufsize=0,
        )
        self.unread = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write((json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            raise SubjectFailed(self.failure("ended")) from None

    def receive(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise SubjectFailed(self.failure(f"did not answer within {PATIENCE:.0f} s"))
                data = os.read(self.popen.stdout.fileno(), 65536)
                if not data:
                    raise SubjectFailed(self.failure("ended"))
                self.unread += data
        line, self.unread = self.unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SubjectFailed(f"{self.subject.name}: {answer['error']}")
        return answer

    def failure(self, what: str) -> str:
        self.log.seek(0)
        tail = self.log.read()[-2000:].decode(errors="replace")
        return f"{self.subject.name}: its process {what}; the end of its stderr:\n{tail}"

    def kill(self) -> None:
        """End the process and its fork, which share a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.log):
            if stream is not None:
                stream.close()


class World:
    """The processes of one subject; those not asked for anything sleep on their pipes."""

    def __init__(self, subject: Subject, size: int, device: str) -> None:
        self.subject = subject
        self.size = size
        self.device = device
        self.about: dict[str, Any] = {}
        self.refused = ""
        self.processes = self.start()

    def start(self) -> list[Process]:
        """Begin importing; `ready` waits for it."""
        return [Process(self.subject, self.device) for _ in range(self.size)]

    def ready(self) -> None:
        """Wait for the imports; a subject that cannot be imported is not tried again."""
        if self.refused:
            raise SubjectFailed(self.refused)
        if not self.processes:
            self.processes = self.start()
        if not self.about:
            try:
                for process in self.processes:
                    self.about = process.receive()
            except SubjectFailed as error:
                self.refused = str(error)
                raise

    def open(self, figure: Figure, fork: bool) -> None:
        """Let as many processes as the figure asks for build it and warm it up; `opened` waits for them."""
        self.ready()
        port = free_port()
        active = self.processes[: figure.processes]
        for rank, process in enumerate(active):
            process.send(
                {
                    "do": "open",
                    "fork": fork,
                    "module": figure.module,
                    "bodies": figure.bodies(self.subject.body),
                    "args": figure.args,
                    "warmup": figure.warmup,
                    "env": {} if figure.processes == 1 else rank_environment(rank, figure.processes, port),
                }
            )

    def opened(self, figure: Figure) -> None:
        for process in self.processes[: figure.processes]:
            process.receive()

    def block(self, figure: Figure) -> list[float]:
        """Seconds per step of one block of each of the figure's bodies: those of the slowest rank."""
        active = self.processes[: figure.processes]
        for process in active:
            process.send({"do": "block", "steps": figure.steps})
        answers: list[dict[str, float]] = [process.receive()["seconds"] for process in active]
        return [max(answer[body] for answer in answers) / figure.steps for body in figure.bodies(self.subject.body)]

    def close(self, figure: Figure) -> None:
        for process in self.processes[: figure.processes]:
            process.send({"do": "close"})

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []
        self.about = {}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def measure(figure: Figure, worlds: dict[str, World], fork: bool) -> Row:
    """Run the figure's subjects in turn, round after round, and judge the medians."""
    samples: dict[str, list[float]] = {name: [] for name in figure.running}
    beside: dict[str, list[float]] = {name: [] for name in figure.running}
    errors: dict[str, str] = {}

    def alive() -> list[str]:
        return [name for name in figure.running if name not in errors]

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        """A subject that fails drops out of this figure; the others are still worth seeing."""
        try:
            return action()
        except SubjectFailed as error:
            worlds[name].kill()
            errors[name] = str(error)
            print(f"{figure.name}: {error}", file=sys.stderr)
            return None

    for _ in range(figure.restarts):
        for name in alive():
            attempt(name, lambda name=name: worlds[name].open(figure, fork))  # type: ignore[misc]
        for name in alive():
            attempt(name, lambda name=name: worlds[name].opened(figure))  # type: ignore[misc]
        deadline = time.monotonic() + figure.seconds / figure.restarts
        for number in range(max(1, figure.rounds // figure.restarts)):
            # At least three rounds, however slow; another subject goes first each time.
            if number >= 3 and time.monotonic() > deadline:
                break
            turn = alive()
            shift = number % max(1, len(turn))
            for name in turn[shift:] + turn[:shift]:
                seconds = attempt(name, lambda name=name: worlds[name].block(figure))  # type: ignore[misc]
                if seconds is not None:
                    samples[name].append(seconds[-1])
                    beside[name].append(seconds[0])
        for name in alive():
            attempt(name, lambda name=name: worlds[name].close(figure))  # type: ignore[misc]
    if errors:
        cells = {name: duration(statistics.median(samples[name])) for name in alive()}
        return Row(figure.name, cells, "failed", target_text(figure), False, {"errors": errors})
    if figure.beside:
        samples[figure.baseline] = beside[figure.baseline] = beside["ours"]
    else:
        beside = dict.fromkeys(samples, samples[figure.baseline])
    return judge(figure, samples, beside)


def judge(figure: Figure, samples: dict[str, list[float]], beside: dict[str, list[float]]) -> Row:
    """beside: for each subject what its samples are compared with, round by round."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    differences = {n: [a - b for a, b in zip(v, beside[n], strict=True)] for n, v in samples.items()}
    added = {name: statistics.median(values) for name, values in differences.items()}
    ours = samples["ours"]
    value: float | None

    ratios: list[float] = []
    if figure.judge == "added":
        # Less than nothing is noise, and so is a peer that adds nothing: no share can be told then.
        value = max(0.0, added["ours"]) / added["peer"] if added["peer"] > 0 else None
        share = "?" if value is None else f"{value:.2f}"
        compared = f"adds {microseconds(added['ours'])} / {microseconds(added['peer'])} = {share}"
    else:
        against = figure.baseline if figure.judge == "baseline" else "peer"
        others = beside["ours"] if figure.judge == "baseline" else samples["peer"]
        ratios = [a / b for a, b in zip(ours, others, strict=True)]
        value = statistics.median(ratios)
        compared = f"{value:.3f} x {against}"
    cells = {figure.baseline: duration(median[figure.baseline])}
    for name in figure.subjects[1:]:
        over = 100 * statistics.median([a / b - 1 for a, b in zip(samples[name], beside[name], strict=True)])
        cells[name] = f"{duration(median[name])} ({over:+.1f}%)"
    raw = {
        "judge": figure.judge,
        "value": value,
        "rounds": len(ours),
        "steps_per_block": figure.steps,
        "processes": figure.processes,
        "arguments": figure.args,
        "median_seconds_per_step": median,
        "median_added_seconds_per_step": added,
        "quartiles_added_seconds_per_step": {name: quartiles(v) for name, v in differences.items()},
        "ratio_is_within": median_is_within(ratios),
    }
    met = None if figure.target is None or value is None else value <= figure.target
    return Row(figure.name, cells, compared, target_text(figure), met, raw)


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values)


def median_is_within(values: Sequence[float]) -> list[float]:
    """Between which two of the values the true median is, in 95 of 100 such measurements."""
    ordered, reach = sorted(values), math.ceil(0.98 * math.sqrt(len(values)))
    middle = (len(ordered) - 1) // 2
    return [ordered[max(0, middle - reach)], ordered[min(len(ordered) - 1, middle + reach)]] if ordered else []


def target_text(figure: Figure) -> str:
    if figure.target is None:
        return "-"
    against = {"added": "of peer's added", "baseline": f"x {figure.baseline}", "peer": "x peer"}[figure.judge]
    return f"<= {figure.target:g} {against}"


def processes_text(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 0.01 else microseconds(seconds)


def introduce(worlds: dict[str, World]) -> dict[str, dict[str, Any]]:
    """Wait until the started worlds have imported all they need; return what each says of itself."""
    for world in worlds.values():
        try:
            world.ready()
        except SubjectFailed as error:
            print(error, file=sys.stderr)
    return {name: dict(world.about) for name, world in worlds.items()}
