"""Reading and changing environment variables, and what the machine says about itself."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

logger: logging.Logger = logging.getLogger("accelerate.utils.environment")  # where the public knows this module

T = TypeVar("T")

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a word as yes or no.

    Args:
        value: "y", "yes", "t", "true", "on", "1", or the opposites.
        to_bool: return True or False instead of 1 or 0.
    """
    word = value.lower()
    if word not in _TRUE and word not in _FALSE:
        raise ValueError(
            f"{value!r} is neither yes nor no; write one of {', '.join(sorted(_TRUE))} or {', '.join(sorted(_FALSE))}."
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read an environment variable as yes or no.

    Args:
        key: the name of the variable.
        default: the value if it is not set.
    """
    value = os.environ.get(key, str(default))
    try:
        return bool(str_to_bool(value))
    except ValueError as error:
        raise ValueError(f"The environment variable {key} cannot be read: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Read an environment variable as text.

    Args:
        key: the name of the variable.
        default: the value if it is not set.
    """
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several environment variables that holds a number of at least 0.

    Args:
        env_keys: the names of the variables.
        default: the value if there is none.
    """
    for key in env_keys:
        text = os.environ.get(key, "-1")
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"The environment variable {key} is {text!r}, which is not a whole number.") from None
        if number >= 0:
            return number
    return default


def flag(text: str) -> bool:
    return bool(str_to_bool(text))


def read_variable(variable: str, read: Callable[[str], Any], default: Any) -> Any:
    """What an environment variable says, or the default where it is not set."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"The environment variable {variable} cannot be read: it is {text!r}.") from None


def read_number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}: give a whole number.") from None


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a `with` block, and restore them exactly.

    Args:
        kwargs: the values, by name in any case; the names of variables are in upper case.
    """
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside a `with` block. Variables that the block sets are removed again."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or a test class, so that its changes to `ACCELERATE_*` variables are undone.

    Args:
        func_or_cls: the function or class.
    """
    if inspect.isclass(func_or_cls):
        _purge_class(func_or_cls)
        return func_or_cls
    return _purge_function(func_or_cls)  # type: ignore[type-var]


F = TypeVar("F", bound=Callable[..., Any])


def _purge_function(function: F) -> F:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with _purged():
                return await function(*args, **kwargs)

        return awaited  # type: ignore[return-value]

    return _purged()(function)  # which enters it again for each call


def _purge_class(cls: type[Any]) -> None:
    _purge_tests(cls)
    own = vars(cls).get("__init_subclass__")

    def init_subclass(sub: type[Any], **kwargs: Any) -> None:
        if own is None:
            super(cls, sub).__init_subclass__(**kwargs)
        else:
            own.__func__(sub, **kwargs)
        _purge_tests(sub)

    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_purge_function(member.__func__)))
        elif callable(member):
            setattr(cls, name, _purge_function(member))


@contextmanager
def _purged() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        added = {name: None for name in os.environ if name.startswith("ACCELERATE_")}
        _restore({**added, **before})


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Format variables as `NAME=value` lines of a file. Variables that could not be read back are left out.

    Args:
        current_env: the variables.

    Returns:
        The lines.
    """
    lines = []
    for name, value in current_env.items():
        text = str(value)
        if not name or not text or any(character in name + text for character in "; \n<>"):
            logger.warning(
                f"The variable {name!r} is left out, because its value {text!r} is empty or contains "
                "one of ; < > space or line break."
            )
        else:
            lines.append(f"{name}={text}\n")
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of several modules that are already imported.

    Args:
        library_names: names of modules.
    """
    return [name for name in library_names if name in sys.modules]


@dataclass
class CPUInformation:
    """Rank of this process among all processes, and among those of its machine.

    Args:
        rank: the rank.
        world_size: the number of processes.
        local_rank: the rank on this machine.
        local_world_size: the number of processes on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read the rank of this process from the variables of torchrun, Intel MPI, Open MPI or MVAPICH."""
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            [
                "LOCAL_WORLD_SIZE",
                "MPI_LOCALNRANKS",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                "MV2_COMM_WORLD_LOCAL_SIZE",
            ],
            1,
        ),
    )


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's accelerator (CUDA if there is none), and the label of a run on it."""
    from accelerate import available

    for device in ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"):
        if getattr(available, f"is_{device}_available")():
            return device, f"MULTI_{device.upper()}"
    return "cuda", "MULTI_GPU"


def _nvidia_smi(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs, and their number."""
    names = [line.strip() for line in _nvidia_smi("name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver."""
    return _nvidia_smi("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Tell whether GPUs can communicate directly. RTX 40 cards cannot before driver 550.40.07."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any("RTX 40" in name for name in names):
            return True
        from packaging.version import parse

        return parse(get_driver_version()) >= parse("550.40.07")
    except (OSError, subprocess.CalledProcessError, IndexError):
        return True


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores closest to its NVIDIA GPU. Without one, nothing happens.

    Args:
        local_process_index: the local rank.
        verbose: log the cores that were chosen.
    """
    import torch

    if not torch.cuda.is_available():
        return
    cpus = _cpus_near_gpu(str(torch.cuda.get_device_properties(local_process_index).uuid))
    if not cpus:
        logger.warning(f"The processors close to GPU {local_process_index} are not known; affinity is unchanged.")
        return
    os.sched_setaffinity(0, cpus)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logger.info(f"Process {local_process_index} runs on the processors {sorted(cpus)}, close to its GPU.")


# Once per process is enough.
set_numa_affinity: Callable[..., None] = functools.cache(override_numa_affinity)


def _cpus_near_gpu(uuid: str) -> set[int]:
    addresses = {}
    for line in _nvidia_smi("uuid,pci.bus_id"):
        name, _, address = line.partition(",")
        addresses[name.strip().removeprefix("GPU-")] = address.strip().lower()
    if uuid not in addresses:
        return set()
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    domain, _, rest = addresses[uuid].partition(":")
    listing = Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist")
    return _parse_cpu_list(listing.read_text()) if listing.exists() else set()


def _parse_cpu_list(text: str) -> set[int]:
    """Read the kernel's notation, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
