from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, size_based_auto_wrap_policy

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.state.engines import fsdp, settings_of
from accelerate.state.engines.base import differences
from accelerate.utils import TorchDynamoPlugin
from tests.harness import run_world


@pytest.mark.parametrize("asked", [{"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, {}])
def test_fsdp_needs_company(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not asked:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "yes")
    fsdp._say_that_nothing_is_sharded.cache_clear()
    before = dict(os.environ)
    accelerator = Accelerator(cpu=True, **asked)
    assert accelerator.distributed_type == DistributedType.NO
    # How scripts ask whether FSDP is on.
    assert getattr(accelerator.state, "fsdp_plugin", None) is None
    assert not accelerator.is_fsdp2 and not AcceleratorState().is_fsdp2
    assert "there is only one process" in caplog.text
    assert dict(os.environ) == before


def test_a_mesh_needs_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"for 2 processes \(tp_size=2\), but there are 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="sp_size=2 splits sequences with DeepSpeed, which is not in use"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is not None and accelerator.torch_device_mesh is None
    assert accelerator.data_parallel_rank == accelerator.tensor_parallel_rank == 0


def test_one_process_says_once_that_nothing_is_sharded(caplog: pytest.LogCaptureFixture) -> None:
    fsdp._say_that_nothing_is_sharded.cache_clear()
    for _ in range(2):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        AcceleratorState._reset_state()
    assert sum("FSDP has nothing to shard across" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["fsdp_plugin", "parallelism_config", "torch_tp_plugin"])
def test_other_objects(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is a str: pass a "):
        Accelerator(cpu=True, **{name: "yes"})  # type: ignore[arg-type]


def test_other_objects_for_a_second_accelerator() -> None:
    Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    with pytest.raises(TypeError, match="fsdp_plugin is a str: pass a "):
        Accelerator(cpu=True, fsdp_plugin="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parallelism_config=str\(...\) \(it is a ParallelismConfig\)"):
        Accelerator(cpu=True, parallelism_config="yes")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="has set its DeepSpeed plugins, or none"):
        Accelerator(cpu=True, deepspeed_plugins={})


@dataclass
class _WithMore(TorchDynamoPlugin):
    more: int = 1


def test_a_second_plugin_of_a_derived_class() -> None:
    Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with pytest.raises(ValueError, match=r"changed to dynamo_plugin with more=1 \(it is None\)"):
        Accelerator(cpu=True, dynamo_plugin=_WithMore(backend="eager"))


def test_a_second_accelerator_cannot_ask_for_other_plugins() -> None:
    Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    Accelerator(cpu=True)  # asks for nothing
    Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))  # asks for the same
    with pytest.raises(ValueError, match=r"changed to dynamo_plugin with backend=.*INDUCTOR.* \(it is .*EAGER"):
        Accelerator(cpu=True, dynamo_backend="inductor")
    with pytest.raises(TypeError, match="dynamo_plugin is a str: pass a TorchDynamoPlugin"):
        Accelerator(cpu=True, dynamo_plugin="eager")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parallelism_config=ParallelismConfig\(...\) \(it has none\)"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def _another_fsdp() -> list[str]:
    def plugin(params: int = 10, **settings: Any) -> FullyShardedDataParallelPlugin:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=params)
        return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy, **settings)

    first = plugin()
    accelerator = Accelerator(fsdp_plugin=first, mixed_precision="bf16")
    accelerator.prepare(torch.nn.Linear(4, 4))
    Accelerator(fsdp_plugin=first)
    Accelerator(fsdp_plugin=plugin())
    Accelerator(fsdp_plugin=copy.copy(first))
    said = []
    for other in (plugin(reshard_after_forward=False), plugin(1000), FullyShardedDataParallelPlugin(fsdp_version=1)):
        with pytest.raises(ValueError) as error:
            Accelerator(fsdp_plugin=other)
        said.append(str(error.value))
    return said


def _wraps(*kinds: type, recurse: bool = True) -> FullyShardedDataParallelPlugin:
    def is_wrapped(module: torch.nn.Module, *, also: tuple[type, ...] = kinds) -> bool:
        return recurse and isinstance(module, also)

    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_wrapped)
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)


def test_policies_from_the_same_lines_are_the_same() -> None:
    first = _wraps(torch.nn.Linear)
    assert differences(_wraps(torch.nn.Linear), first, settings_of(first)) == []
    for other in (_wraps(torch.nn.Conv1d), _wraps(torch.nn.Linear, recurse=False)):
        (said,) = differences(other, first, settings_of(first))
        assert said.startswith("auto_wrap_policy=")


def test_a_second_accelerator_cannot_ask_for_another_fsdp() -> None:
    for said in run_world(_another_fsdp, 2):
        assert "reshard_after_forward=False (it is True)" in said[0]
        assert "auto_wrap_policy=" in said[1] and "min_num_params=1000" in said[1]
        assert "fsdp_version=1 (it is 2)" in said[2]
