"""PartialState: which process am I, on which device, and how do I reach the others."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from accelerate import devices, environments
from accelerate.comm import Communicator, current, set_current, set_factory
from accelerate.config.enums import DistributedType
from accelerate.config.environment import override_numa_affinity, parse_flag_from_env
from accelerate.config.handlers import default_timeout
from accelerate.diagnosis import limits
from accelerate.environments import World, torchrun
from accelerate.errors import warn
from accelerate.per_rank import ThreadLocalSharedDict, are_ranks_threads
from accelerate.state import ending
from accelerate.state.processes import ProcessControl


class PartialState(ProcessControl):
    """The distributed environment of this process. It is shared by all instances, and set up by the first.

    Args:
        cpu: use the CPU even if there is an accelerator.
        kwargs: arguments for `torch.distributed.init_process_group`, such as `backend`, `timeout` and `init_method`.
    """

    _shared_state: Any = ThreadLocalSharedDict()

    device: torch.device
    device_kind: devices.Device
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    _group_ended = False  # whether there was a process group that has been taken down
    _groups_ended = 0  # how many of them there were in this process

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            self._check_group_options(kwargs)
        else:
            self._set_up(cpu, kwargs)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}"
            f"{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there: most often because the state was reset under a living instance.
        if any(name in vars(kind).get("__annotations__", ()) for kind in type(self).__mro__):
            raise AttributeError(
                f"This state has no `{name}` because it was reset: create a new `PartialState()` or `Accelerator()`."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def _reset_state() -> None:
        """Forget everything; the next instance looks at the environment again. The process group stays."""
        PartialState._shared_state.clear()
        set_current(None)

    @property
    def initialized(self) -> bool:
        """Whether the state has been set up."""
        return self._shared_state != {}

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook has forked this process."""
        return bool(self._fork_launched)

    @property
    def use_distributed(self) -> bool:
        """Whether several processes are at work."""
        return self.num_processes > 1

    @property
    def default_device(self) -> torch.device:
        """The device a single process would use on this machine."""
        return devices.choose({}).device.default()

    def set_device(self) -> None:
        """Choose the device of this process, unless it has one already."""
        if "device" not in self.__dict__:
            self.device = _select(devices.choose(os.environ, self._cpu), environments.detect(os.environ))

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a process group.

        Args:
            group: the group. By default the main one.
        """
        if self.fork_launched and group is None:
            return  # the notebook's main process still needs it
        if dist.is_available() and dist.is_initialized():
            if group is None:
                from accelerate.diagnosis import watch
                from accelerate.state import stopping

                watch.stop()
                stopping.close()
            ending.take_down(group)
            if group is None:
                self._group_ended = True
                PartialState._groups_ended += 1

    def _meet_again(self) -> None:
        """Make the process group again, on all ranks; what watches over this one goes on."""
        ending.take_down(None)
        PartialState._groups_ended += 1
        self.device_kind.join(self.world, self._group_options, PartialState._groups_ended)
        self._talk_through(self.device_kind.communicator(self.device))

    def _talk_through(self, communicator: Communicator) -> None:
        if self.debug and self.backend is not None:
            from accelerate.comm.checked import Checked

            communicator = Checked(communicator)  # type: ignore[assignment]
        set_current(communicator)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """What processes talk through (None leaves it to the device), and the kind of set-up they form.

        Scripts put a function of their own here: one that answers `(None, DistributedType.NO)` keeps a process alone.
        """
        return backend, devices.choose(os.environ, cpu).device.label

    @staticmethod
    def _attempt() -> str:
        """Tells the store's notes of this world from those of earlier ones."""
        return f"{torchrun.attempt(os.environ)}-{PartialState._groups_ended}"

    def _check_group_options(self, options: dict[str, Any]) -> None:
        """Say what a process group that exists already cannot take up any more."""
        if self.backend is None:
            return
        known = {"timeout": default_timeout(self.backend), **self._group_options, "backend": self.backend}
        asked = {name: options[name] for name in ("backend", "init_method", "timeout") if options.get(name) is not None}
        if str(asked.get("backend")) in self.backend:  # "gloo" is part of "cpu:gloo,cuda:nccl"
            del asked["backend"]
        late = [name for name, value in asked.items() if value != known.get(name)]
        if late:
            words = ", ".join(f"{name}={str(asked[name])!r} (it has {str(known.get(name))!r})" for name in late)
            warn(
                f"The process group of this run exists already and cannot take {words}: pass it to the first "
                "`Accelerator()` or `PartialState()` of the process."
            )

    def _set_up(self, cpu: bool, kwargs: dict[str, Any]) -> None:
        kwargs.pop("_use_sagemaker", None)
        # Everything that may fail comes first: a half-made state would pass for a finished one.
        debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        fork_launched = parse_flag_from_env("FORK_LAUNCHED")
        affinity = parse_flag_from_env("ACCELERATE_CPU_AFFINITY")
        limits.check(os.environ)
        world = environments.detect(os.environ)
        if "rank" not in kwargs and not (dist.is_available() and dist.is_initialized()):
            environments.refuse_half_a_world(os.environ)
        choice = devices.choose(os.environ, cpu)
        if parse_flag_from_env("ACCELERATE_USE_FSDP"):  # by a launch; some devices have to know before they are used
            choice.device.will_shard()
        backend, label = self._prepare_backend(cpu, False, kwargs.get("backend"))
        joined = None
        if label != DistributedType.NO:
            options = kwargs if backend is None else {**kwargs, "backend": backend}
            joined = choice.device.join(world, options, PartialState._groups_ended)
        world, backend = (world, None) if joined is None else joined
        distributed = joined is not None
        if distributed:
            ending.joined()
        device = _select(choice, world if distributed else None)
        communicator = choice.device.communicator(device) if distributed else Communicator()
        if communicator.size > 1 and not are_ranks_threads():
            from accelerate.diagnosis import watch
            from accelerate.state import lost

            lost.watch(world, communicator)
            watched = replace(world, rank=communicator.rank, size=communicator.size)
            watch.start(watched, self._attempt(), os.environ, lambda: choice.device.works(device))

        self._cpu = cpu or choice.device.name == "cpu"
        self.debug = debug
        self.backend = backend
        self.device = device
        self.distributed_type = choice.device.label if distributed else DistributedType.NO
        self.num_processes: int = communicator.size
        self.process_index: int = communicator.rank
        self.local_process_index: int = world.local_rank if distributed else 0
        self._fork_launched = fork_launched
        self._group_options = kwargs
        self.world = world
        self.device_kind = choice.device
        self.device_reason: str = choice.reason
        self._talk_through(communicator)
        _share_the_cores(choice.device, world)
        if affinity:
            override_numa_affinity(self.local_process_index)


def _select(choice: devices.Choice, world: World | None) -> torch.device:
    """The device of this process. world: None for a process alone."""
    if choice.pinned is not None:
        return choice.device.pin(choice.pinned)
    return choice.device.default() if world is None else choice.device.select(world.local_rank)


def _share_the_cores(device: devices.Device, world: World) -> None:
    """Without a word from the launcher, each process on a machine would start a thread for every core."""
    if device.name == "cpu" and world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))


def wait_for_everyone() -> None:
    """Wait until every rank has called this."""
    PartialState().wait_for_everyone()


def _communicator() -> Communicator:
    if PartialState._shared_state:
        raise RuntimeError(
            f"The process group of rank {PartialState().process_index} has been destroyed, and the program is about "
            "to end: exchange data before that."
        )
    PartialState()
    return current()


set_factory(_communicator)
