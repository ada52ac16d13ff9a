"""Arguments for the torch objects that an `Accelerator` makes on the user's behalf."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accelerate.config.enums import DDPCommunicationHookType
from accelerate.errors import a_kind_of

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile

# torch's own defaults; set here because a missing timeout must mean the same on every version of torch.
_TIMEOUT = timedelta(minutes=30)
_NCCL_TIMEOUT = timedelta(minutes=10)


class KwargsHandler:
    """Hold keyword arguments, of which only those that differ from the defaults are passed on."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Set arguments of `torch.autocast`.

    Args:
        enabled: use autocast.
        cache_enabled: keep the casts of weights inside a block. By default as torch does.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Set arguments of the gradient scaler of fp16 training (`torch.amp.GradScaler`).

    Args:
        init_scale: the first scale.
        growth_factor: multiply the scale by this after `growth_interval` steps without overflow.
        backoff_factor: multiply the scale by this after an overflow.
        growth_interval: the number of steps.
        enabled: scale losses.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Set arguments of `torch.distributed.init_process_group`.

    Args:
        backend: "nccl", "gloo" or another backend of torch.
        init_method: the URL by which the ranks find each other.
        timeout: how long a collective may take. By default 10 minutes with NCCL, else 30.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = default_timeout(self.backend)
        elif not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"timeout of InitProcessGroupKwargs is {self.timeout!r}, {a_kind_of(self.timeout)}: pass a "
                f"`datetime.timedelta`, such as `timedelta(seconds={self.timeout})`."
            )
        if isinstance(self.backend, str):
            _refuse_misspelt_backend(self.backend)


def _refuse_misspelt_backend(backend: str) -> None:
    """Raise for what is nearly the name of a backend; any other one may still be registered with torch."""
    from accelerate.available import known_backends
    from accelerate.text import did_you_mean

    known = known_backends()
    for part in backend.lower().split(","):  # "cpu:gloo,cuda:nccl"
        name = part.rpartition(":")[2]
        of_vendor = name.endswith("ccl")  # as most vendors call theirs
        if name not in known and not of_vendor and (near := did_you_mean(name, known)):
            raise ValueError(f"backend of InitProcessGroupKwargs is {backend!r}{near}: pass one that torch knows.")


def default_timeout(backend: str | None) -> timedelta:
    """How long a collective may take where nobody says it, as torch has it."""
    return _NCCL_TIMEOUT if backend == "nccl" else _TIMEOUT


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Set arguments of `torch.nn.parallel.DistributedDataParallel`, and how gradients are compressed.

    Args:
        dim: the dimension of a batch.
        broadcast_buffers: broadcast buffers from rank 0 before each forward.
        bucket_cap_mb: the size of the buckets in which gradients are averaged, in MB.
        find_unused_parameters: allow a forward that does not use all parameters.
        check_reduction: accepted as torch does.
        gradient_as_bucket_view: keep gradients in the buckets, which saves memory.
        static_graph: promise that all steps use the same parameters.
        comm_hook: how gradients are compressed, as a member of `DDPCommunicationHookType` or its name.
        comm_wrapper: a second compression around it: "no", "fp16" or "bf16".
        comm_state_option: arguments for the state of the PowerSGD hooks.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of the fields that DDP itself takes.

        Args:
            ignore_keys: fields that are left out.
        """
        ignored = set(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the chosen communication hook on a DDP model. Without one, nothing happens.

        Args:
            model: the DDP model.
        """
        name = _hook_name("comm_hook", self.comm_hook, DDPCommunicationHookType.list())
        wrapper = _hook_name("comm_wrapper", self.comm_wrapper, ["no", "fp16", "bf16"])
        if name == "no":
            return

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
            "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[str, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        hook = wrappers[wrapper](hooks[name]) if wrapper in wrappers else hooks[name]
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if name.endswith("power_sgd") else None
        model.register_comm_hook(state=state, hook=hook)


def _hook_name(argument: str, value: Any, allowed: list[str]) -> str:
    name = value.value if isinstance(value, DDPCommunicationHookType) else value
    if name not in allowed:
        raise ValueError(
            f"`{argument}` of DistributedDataParallelKwargs is {name!r}; choose one of {', '.join(allowed)}."
        )
    return str(name)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Set arguments of `torch.profiler.profile`.

    Args:
        activities: what is recorded: "cpu", "cuda", "xpu" and others that torch knows.
        schedule_option: arguments of `torch.profiler.schedule`.
        on_trace_ready: called with the profiler when a trace is complete.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record where in the source an operation was called.
        with_flops: estimate the floating-point operations of matrix products and convolutions.
        with_modules: record the modules that operations belong to.
        output_trace_dir: a folder that gets the trace of each rank.

    Example:
        ```python
        with accelerator.profile(ProfileKwargs(activities=["cpu", "cuda"], output_trace_dir="traces")) as prof:
            train_one_epoch()
        ```
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activities, str):
            raise TypeError(f"activities is {self.activities!r}: pass a list, `activities=[{self.activities!r}]`.")
        self._activities()

    def build(self) -> profile:
        """Create the profiler."""
        import torch

        return torch.profiler.profile(
            activities=self._activities(),
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _activities(self) -> list[Any] | None:
        if self.activities is None:
            return None
        from torch.profiler import ProfilerActivity

        from accelerate.text import did_you_mean

        known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        unknown = [f"{name!r}{did_you_mean(str(name), known)}" for name in self.activities if name not in known]
        if unknown:
            raise ValueError(
                f"The profiler does not know the activity {', '.join(unknown)}: choose from those of this torch, "
                f"{', '.join(sorted(known))}."
            )
        return [known[name] for name in self.activities]
