"""Arguments for the torch objects that an `Accelerator` makes on the user's behalf."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accelerate.config.enums import DDPCommunicationHookType

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile

# torch's own defaults; set here because a missing timeout must mean the same on every version of torch.
_TIMEOUT = timedelta(minutes=30)
_NCCL_TIMEOUT = timedelta(minutes=10)


class KwargsHandler:
    """A set of keyword arguments, of which only those that were changed are passed on."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for the gradient scaler of fp16 training."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments for `torch.distributed.init_process_group`."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = _NCCL_TIMEOUT if self.backend == "nccl" else _TIMEOUT


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for `torch.nn.parallel.DistributedDataParallel`, and how it compresses gradients.

    `comm_hook` and `comm_wrapper` are taken as members or as their names; `comm_state_option` holds arguments
    for the state of the PowerSGD hooks.
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
        """Returns a copy of the fields that DDP itself takes."""
        ignored = set(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Puts the chosen hook on a DDP model; without one, does nothing."""
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
    """Arguments for `torch.profiler.profile`; with `output_trace_dir`, each rank's trace goes there."""

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profile:
        """Makes the profiler."""
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

        known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities if name not in known]
        if unknown:
            raise ValueError(
                f"The profiler knows no activity {', '.join(map(repr, unknown))}; "
                f"this torch knows {', '.join(sorted(known))}."
            )
        return [known[name] for name in self.activities]
