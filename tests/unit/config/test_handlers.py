from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.config.enums import DDPCommunicationHookType
from accelerate.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class Recorder:
    """Stands where a DDP model would, to see what is registered without a process group."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.calls.append((state, hook))


def registered(**kwargs: Any) -> list[tuple[Any, Any]]:
    model = Recorder()
    DistributedDataParallelKwargs(**kwargs).register_comm_hook(model)  # type: ignore[arg-type]
    return model.calls


def test_only_changed_fields_are_passed_on() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=3.0, enabled=False).to_kwargs() == {
        "init_scale": 3.0,
        "enabled": False,
    }
    assert AutocastKwargs(enabled=False).to_kwargs() == {"enabled": False}


def test_a_field_assigned_later_counts() -> None:
    handler = GradScalerKwargs()
    handler.growth_interval = 5
    assert handler.to_kwargs() == {"growth_interval": 5}


def test_to_dict_is_a_copy() -> None:
    handler = ProfileKwargs(schedule_option={"wait": 1})
    handler.to_dict()["schedule_option"]["wait"] = 2
    assert handler.schedule_option == {"wait": 1}


def test_ddp_itself_never_sees_the_hook() -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType.FP16)
    assert handler.to_kwargs() == {"bucket_cap_mb": 3}
    assert "comm_hook" in handler.to_dict(ignore_keys=())


def test_timeouts_depend_on_the_backend() -> None:
    assert InitProcessGroupKwargs().timeout == timedelta(minutes=10)
    assert InitProcessGroupKwargs(backend="gloo").timeout == timedelta(minutes=30)
    assert InitProcessGroupKwargs(backend=None).timeout == timedelta(minutes=30)
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}


@pytest.mark.parametrize("backend", ["glo", "cpu:glo,cuda:nccl", "cuda:nclc"])
def test_a_misspelt_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"InitProcessGroupKwargs is '{backend}' \(did you mean `(gloo|nccl)`\?\)"):
        InitProcessGroupKwargs(backend=backend)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "GLOO", "mpi", "hccl", "xccl", "ccl", "my_own", "cpu:fake"])
def test_backends_that_there_may_be(backend: str) -> None:
    assert InitProcessGroupKwargs(backend=backend).backend == backend


def test_a_timeout_is_no_number() -> None:
    with pytest.raises(
        TypeError, match=r"is 30, an int: pass a `datetime\.timedelta`, such as `timedelta\(seconds=30\)`"
    ):
        InitProcessGroupKwargs(timeout=30)  # type: ignore[arg-type]


def test_no_hook_registers_nothing() -> None:
    assert registered() == []
    assert registered(comm_wrapper=DDPCommunicationHookType.FP16) == []


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("fp16", default_hooks.fp16_compress_hook),
        ("bf16", default_hooks.bf16_compress_hook),
        ("power_sgd", powerSGD_hook.powerSGD_hook),
        ("batched_power_sgd", powerSGD_hook.batched_powerSGD_hook),
    ],
)
def test_each_hook(name: str, hook: Any) -> None:
    assert registered(comm_hook=DDPCommunicationHookType(name))[0][1] is hook
    # The plain name means the same.
    assert registered(comm_hook=name)[0][1] is hook


def test_power_sgd_gets_its_options() -> None:
    [(state, _)] = registered(comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2})
    assert state.matrix_approximation_rank == 2
    assert registered(comm_hook="fp16")[0][0] is None


def test_wrapped_hooks() -> None:
    [(_, hook)] = registered(comm_hook="power_sgd", comm_wrapper="fp16")
    assert "fp16_compress_wrapper" in hook.__qualname__
    [(_, hook)] = registered(comm_hook="fp16", comm_wrapper=DDPCommunicationHookType.BF16)
    assert "bf16_compress_wrapper" in hook.__qualname__


def test_unknown_hooks_are_named() -> None:
    with pytest.raises(ValueError, match=r"`comm_hook`.*'fp17'.*power_sgd"):
        registered(comm_hook="fp17")
    with pytest.raises(ValueError, match=r"`comm_wrapper`.*'power_sgd'"):
        registered(comm_hook="fp16", comm_wrapper="power_sgd")


def test_profile() -> None:
    with ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in profiler.key_averages())


def test_profile_schedule_and_callback() -> None:
    traces: list[Any] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
        on_trace_ready=traces.append,
    )
    with handler.build() as profiler:
        for _ in range(3):
            torch.ones(3) + 1
            profiler.step()
    assert len(traces) == 1


def test_unknown_activities_are_named() -> None:
    with pytest.raises(ValueError, match=r"'gpu': .*cpu.*cuda"):
        ProfileKwargs(activities=["cpu", "gpu"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"'cdua' \(did you mean `cuda`\?\): choose from"):
        ProfileKwargs(activities=["cdua"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"activities is 'cpu': pass a list, `activities=\['cpu'\]`\."):
        ProfileKwargs(activities="cpu")  # type: ignore[arg-type]
