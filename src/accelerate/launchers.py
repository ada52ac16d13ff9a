"""Running a function, instead of a script, on several processes: from a notebook, or in a test."""

from __future__ import annotations

import contextlib
import gc
import logging
import operator
import os
import pickle
import reprlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate.available import has_package, is_cuda_available
from accelerate.config.enums import DistributedType, PrecisionType
from accelerate.config.environment import parse_flag_from_env, patch_environment
from accelerate.devices import CUDA, XLA, cuda_start
from accelerate.errors import a_kind_of
from accelerate.launch.meeting import meeting_point
from accelerate.launch.scratch import scratch_folder
from accelerate.launch.tpu import chips
from accelerate.launch.worker import print_lines, warn_once
from accelerate.machine import get_free_port
from accelerate.state import AcceleratorState, GradientState, PartialState, lost

ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"

# These report how workers ended, with tracebacks, which is then raised here anyway.
_ECHOES = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)

# What tells the state that a run of one process has made in this notebook from one that the notebook has made itself.
_trial: Any = None

cuda_start.remember()


class LaunchFailed(ChildFailedError):
    """A process of `notebook_launcher` failed; the message ends with its traceback."""

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank that failed first, and its failure."""
        return min(self.failures.items(), key=lambda item: _order(item[1]))

    def format_msg(self, *args: Any, **kwargs: Any) -> str:
        rank, first = self.get_first_failure()
        how = _how_it_ended(first)
        alike = [other for other, failure in sorted(self.failures.items()) if _how_it_ended(failure) == how]
        who = f"Rank {rank}" if len(alike) == 1 else f"Ranks {', '.join(map(str, alike))}"
        return f"{who} of {self.name} {how}"


class PrepareForLaunch:
    """A function that `torch.multiprocessing.start_processes` can start: it is called with the local rank first.

    Args:
        launcher: the function to run.
        distributed_type: stored for code that reads it.
        debug: whether the processes are those of `debug_launcher`.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type: DistributedType = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        before = int(os.environ.get("NODE_RANK", "0")) * int(os.environ.get("NPROC", "0"))
        os.environ.update(LOCAL_RANK=str(index), RANK=str(before + index), FORK_LAUNCHED="1")
        if self.debug:
            _forget_parent()
            print_lines()
        self.launcher(*args)


class _Entry:
    """The user's function on its way to another process, which a function of a notebook cannot reach by its name."""

    def __init__(self, function: Callable[..., Any], forked: bool, folder: str = "") -> None:
        self.function = function
        self.forked = forked
        self.folder = folder  # of the launcher, for what its processes tell each other
        self.__qualname__ = self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any) -> Any:
        if self.forked:
            _forget_parent()
        sys.stdout, sys.stderr = _Lines(sys.stdout), _Lines(sys.stderr)
        signal.signal(signal.SIGINT, _interrupted)
        if self.folder:
            warn_once(self.folder)
        try:
            return self.function(*args)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)  # without a traceback: the cell of the notebook has one
        except Exception as error:
            lost.told(error, error.__traceback__)  # torch catches it before any hook could
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        if _can_be_imported(self.function):
            return _Entry, (self.function, self.forked, self.folder)
        import cloudpickle

        return _unpacked, (cloudpickle.dumps(self.function), self.forked, self.folder)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """SIGINT in a process of a notebook: it comes from the notebook and from torch elastic, and once is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Lines:
    """Hands whole lines on to the stream of a notebook, so that those of several processes are not mixed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        lines, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            self._stream.write(lines + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            self._stream.write(begun)
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _unpacked(function: bytes, forked: bool, folder: str) -> _Entry:
    return _Entry(pickle.loads(function), forked, folder)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    start_method: str | None = None,
) -> None:
    """Run a training function on several processes of this machine, and of others, from a notebook.

    Args:
        function: what to call on each process. It creates the `Accelerator`, and everything that touches a GPU.
        args: its arguments.
        num_processes: the number of processes on this machine. By default one per GPU, or per chip of a TPU, or one.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for the `Accelerator` in the function.
        use_port: the port where the processes meet. On one machine, a free one is used if it is taken.
        master_addr: the address of the first machine.
        node_rank: which machine this is.
        num_nodes: the number of machines. Call it on each of them.
        rdzv_backend: the rendezvous backend of torch elastic.
        rdzv_endpoint: the rendezvous endpoint of torch elastic.
        rdzv_conf: further settings of the rendezvous.
        rdzv_id: the id of the rendezvous.
        max_restarts: how often all processes are restarted after one has failed.
        monitor_interval: seconds between two checks of the processes.
        log_line_prefix_template: the prefix of each line of output that torch elastic forwards.
        start_method: "fork" (the default), or "spawn", which also works if CUDA is already in use. It sends the
            function to new processes; one that is defined in the notebook, or inside another function, needs
            `cloudpickle` for that.
    """
    on_tpu = _on_tpu()
    if num_processes is None:
        num_processes = (chips() if on_tpu else _gpus()) or 1
    _check_arguments(function, args, num_processes=num_processes, node_rank=node_rank, num_nodes=num_nodes)
    _check(num_processes, mixed_precision, node_rank, num_nodes, start_method)
    if num_processes * num_nodes == 1:
        print(f"Running {_name(function)} in this process.")
        with _trial_run(str(mixed_precision).lower()):
            function(*args)
        return

    try:
        port = int(use_port)
    except (TypeError, ValueError):
        raise ValueError(f"use_port is {use_port!r}, but should be a number such as '29500'.") from None
    start_method = start_method or ("fork" if hasattr(os, "fork") else "spawn")
    _check_ready(function, start_method)
    if on_tpu:
        _check_chips(num_processes, start_method)
    if 0 < _gpus() < num_processes:
        warnings.warn(f"{num_processes} processes will share {_gpus()} GPU(s), which NCCL refuses.", stacklevel=2)
    if rdzv_backend == "static":
        rdzv_conf = {"rank": node_rank, **(rdzv_conf or {})}

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    where = f" on each of {num_nodes} machines" if num_nodes > 1 else ""
    print(f"Running {_name(function)} on {num_processes} processes{where}.")
    with (
        _endpoint(rdzv_endpoint, rdzv_backend, master_addr, port, node_rank, num_nodes) as endpoint,
        _environment(mixed_precision, start_method, num_nodes),
        _without_echoes(),
        _without_collecting(),
        scratch_folder() as folder,
    ):
        config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=num_processes,
            run_id=rdzv_id,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=rdzv_conf or {},
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
        )
        try:
            elastic_launch(config, _Entry(function, start_method == "fork", str(folder)))(*args)
        except ChildFailedError as error:
            raise LaunchFailed(_name(function), _with_others(error.failures)) from None
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None  # as if the function had run here
            raise


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes of this machine, to test it. A failure in one of them is raised here.

    Args:
        function: what to call on each process.
        args: its arguments.
        num_processes: the number of processes.
    """
    from torch.multiprocessing.spawn import start_processes

    _check_arguments(function, args, num_processes=num_processes)
    world = {
        "world_size": num_processes,
        "local_world_size": num_processes,
        "master_addr": "127.0.0.1",
        "master_port": get_free_port(),
        "accelerate_use_cpu": "yes",
    }
    with _environment("no", "fork", 1), patch_environment(**world), _without_echoes(), _without_collecting():
        launcher = PrepareForLaunch(function, debug=True)
        start_processes(launcher, args=tuple(args), nprocs=num_processes, start_method="fork")


def test_launch() -> None:
    """Join the other ranks and do nothing else, to try out a launcher."""
    PartialState()


# pytest would take it for a test wherever it is imported.
test_launch.__test__ = False  # type: ignore[attr-defined]


def _check_arguments(function: Any, args: Any, **numbers: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"The first argument is {reprlib.repr(function)}, {a_kind_of(function)}, not a function: pass the "
            "function without calling it, and its arguments as `args`."
        )
    if isinstance(args, (str, Mapping)) or not isinstance(args, Iterable):
        shown = reprlib.repr(args)
        raise ValueError(f"args is {shown}, but should be a tuple or a list: one argument is written `({shown},)`.")
    for name, value in numbers.items():
        try:
            operator.index(value)
        except TypeError:
            raise ValueError(f"{name} is {value!r}, but should be a whole number.") from None


@contextlib.contextmanager
def _trial_run(mixed_precision: str) -> Iterator[None]:
    """A run in this process, after which others may follow; what it makes may still be used until then."""
    global _trial
    if _made_by_trial() and AcceleratorState._shared_state.get("_mixed_precision") != mixed_precision:
        AcceleratorState._reset_state()  # the precision is that of the first `Accelerator` otherwise
    fresh = PartialState._shared_state == {}
    try:
        with patch_environment(accelerate_mixed_precision=mixed_precision):
            yield
    finally:
        if fresh:
            _trial = PartialState._shared_state.get("world")


def _made_by_trial() -> bool:
    """Whether the state of this process was made by a function that `notebook_launcher` ran in it."""
    return _trial is not None and PartialState._shared_state.get("world") is _trial


def _check(num_processes: int, mixed_precision: str, node_rank: int, num_nodes: int, start_method: str | None) -> None:
    if num_processes < 1:
        raise ValueError(f"num_processes is {num_processes}: at least one is needed.")
    if str(mixed_precision).lower() not in PrecisionType.list():
        known = ", ".join(PrecisionType.list())
        raise ValueError(f"mixed_precision is {mixed_precision!r}: choose one of {known}.")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank is {node_rank} and num_nodes {num_nodes}: machines count from 0 to num_nodes - 1.")
    if start_method not in (None, "fork", "spawn"):
        raise ValueError(f"start_method is {start_method!r}: choose 'fork' or 'spawn'.")


def _check_ready(function: Callable[..., Any], start_method: str) -> None:
    """Refuse what would fail in the new processes, where the error would be far from its cause."""
    # The processes forget the state of a trial, and the function makes its own.
    if PartialState._shared_state != {} and not _made_by_trial():
        raise ValueError(
            "An Accelerator or PartialState has already been created in this notebook, so the function could use "
            "that one instead of its own: restart the kernel, and create it inside the function only."
        )
    if start_method == "spawn":
        if not _can_be_imported(function) and not has_package("cloudpickle"):
            raise ValueError(
                f"start_method='spawn' has to send {_name(function)} to new processes, which cannot import it: install "
                "cloudpickle, or define it with `def` at the top of a module and import it from there."
            )
        return
    if cuda_start.has_started():
        if (line := cuda_start.place()) is not None:
            by = f" by {line}"
        elif suspects := cuda_start.suspects():
            by = f", by a line that ran before accelerate was imported (maybe {suspects[0]})"
        else:
            by = ", by a line that ran before accelerate was imported"
        raise RuntimeError(
            f"CUDA was started in this notebook{by}, and forked processes could not use the GPUs: restart the kernel "
            "and do that inside the function only, or pass start_method='spawn'."
        )


def _check_chips(num_processes: int, start_method: str) -> None:
    from accelerate.torch_internals.xla import has_started

    if chips() not in (0, num_processes):
        raise ValueError(
            f"num_processes is {num_processes}, but this TPU has {chips()} chips: pass 1, or leave it out to have "
            "one for each chip."
        )
    if start_method == "fork" and has_started():
        raise RuntimeError(
            "The TPU is in use by this notebook, and forked processes could not use it: restart the kernel and touch "
            "its devices inside the function only, or pass start_method='spawn'."
        )


def _can_be_imported(function: Callable[..., Any]) -> bool:
    """Whether a new process finds it by its name: it was read from a file, and is not inside of another function."""
    if isinstance(function, FunctionType) and "<" in function.__qualname__:  # <lambda>, <locals>
        return False
    return function.__module__ != "__main__" or hasattr(sys.modules["__main__"], "__file__")


@contextlib.contextmanager
def _endpoint(given: str, backend: str, address: str, port: int, node_rank: int, num_nodes: int) -> Iterator[str]:
    """Where the processes meet; the first machine listens there."""
    if given or backend != "static":
        yield given
    elif node_rank > 0:
        yield f"{address}:{port}"
    else:
        # On one machine nobody else needs to know the port, so a free one will do.
        with meeting_point(port, num_nodes == 1, "`use_port`") as taken:
            yield f"{address}:{taken}"


def _on_tpu() -> bool:
    """Whether the function will find an XLA device."""
    wanted = os.environ.get("ACCELERATE_TORCH_DEVICE", "xla").partition(":")[0]
    return wanted in ("", "xla") and not parse_flag_from_env("ACCELERATE_USE_CPU") and XLA().available()


def _gpus() -> int:
    if parse_flag_from_env("ACCELERATE_USE_CPU") or not is_cuda_available():
        return 0
    return CUDA().count()


@contextlib.contextmanager
def _environment(mixed_precision: str, start_method: str, num_nodes: int) -> Iterator[None]:
    """What the processes inherit."""
    variables = {"accelerate_mixed_precision": str(mixed_precision).lower()}
    if start_method == "fork":
        variables["fork_launched"] = "1"
        # A fork has none of the threads that OpenMP keeps for the next parallel loop, and would wait for them.
        variables["omp_num_threads"] = "1"
        # torch elastic asks whether there is a GPU; unless NVML answers, that alone keeps forked processes from it.
        variables["pytorch_nvml_based_cuda_check"] = "1"
    if num_nodes == 1 and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["gloo_socket_ifname"] = "lo"  # a laptop's own name need not resolve
    # torch elastic sets this one for its workers, and leaves it.
    signals = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    try:
        with patch_environment(**variables):
            yield
    finally:
        if signals is None:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Have forked processes collect no garbage of this one before they have set it aside.

    A store of an earlier launch, for one, would wait for its thread, in whose place a fork may have another one.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _forget_parent() -> None:
    """In a forked process: start as if this one had been started by itself."""
    gc.freeze()  # see `_without_collecting`
    gc.enable()
    torch.set_num_threads(1)
    PartialState._reset_state()
    AcceleratorState._reset_state()
    GradientState._reset_state()


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _ECHOES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _with_others(failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """Also those of the other processes of this machine that wrote theirs down; torch elastic tells of one alone."""
    found = dict(failures)
    for rank, failure in failures.items():
        before = rank - failure.local_rank
        own = Path(failure.error_file)  # which one that was killed has not written
        for file in own.parent.parent.glob("*/error.json") if own.is_file() else []:
            local_rank = int(file.parent.name)
            if before + local_rank not in found:
                with contextlib.suppress(OSError, ValueError, KeyError):  # ended while it wrote
                    found[before + local_rank] = ProcessFailure(local_rank, 0, 1, str(file))
    return found


def _order(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """For sorting: those that were ended because of others last, and before them those that have lost contact."""
    message: Any = failure.message
    text = str(message.get("message", "")) if isinstance(message, dict) else ""
    return failure.exitcode == -signal.SIGTERM, lost.is_about_others(text), failure.timestamp


def _how_it_ended(failure: ProcessFailure) -> str:
    message: Any = failure.message  # a dict, if the process had the time to write one
    if isinstance(message, dict):
        return f"failed:\n\n{message.get('extraInfo', {}).get('py_callstack', message)}"
    if failure.exitcode >= 0:
        return f"exited with code {failure.exitcode}."
    name = signal.Signals(-failure.exitcode).name
    hint = ": most often the machine ran out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}."
