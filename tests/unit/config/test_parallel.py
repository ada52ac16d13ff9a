"""ParallelismConfig and the settings of its axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate import ParallelismConfig
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)


@pytest.mark.parametrize(
    ("sizes", "active", "data", "shards", "loss", "fsdp", "total"),
    [
        ({}, [], [], [], [], ["dp_shard_cp"], 1),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 2},
            ["dp_replicate", "dp_shard", "tp", "cp"],
            ["dp_replicate", "dp_shard"],
            ["dp_shard", "cp"],
            ["dp_replicate", "dp_shard", "cp"],
            ["dp_replicate", "dp_shard_cp"],
            16,
        ),
        ({"tp_size": 2}, ["tp"], [], [], [], ["dp_shard_cp"], 2),
        ({"cp_size": 4}, ["cp"], [], ["cp"], ["cp"], ["dp_shard_cp"], 4),
        ({"sp_size": 2}, ["sp"], [], [], [], ["dp_shard_cp"], 2),
    ],
)
def test_axes(
    sizes: dict[str, int],
    active: list[str],
    data: list[str],
    shards: list[str],
    loss: list[str],
    fsdp: list[str],
    total: int,
) -> None:
    config = ParallelismConfig(**sizes)
    assert config.active_mesh_dims == active
    assert config.dp_dim_names == data
    assert config.dp_shard_cp_dim_names == shards
    assert config.dp_cp_dim_names == loss
    assert config.fsdp_dim_names == fsdp
    assert config.total_size == total
    assert config.data_parallel_size * config.non_data_parallel_size == total
    assert config.non_dp_dim_names == [axis for axis in active if axis in ("tp", "cp", "sp")]
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        assert getattr(config, f"{axis}_enabled") == (axis in active)
    assert (config.tp_handler is not None) == ("tp" in active)
    assert (config.cp_handler is not None) == ("cp" in active)
    assert (config.sp_handler is not None) == ("sp" in active)
    assert f"total_size={total}" in repr(config)
    assert config.to_json()["tp_size"] == config.tp_size


def test_sizes_may_be_assigned() -> None:
    config = ParallelismConfig()
    config.tp_size = 2
    assert config.tp_enabled and config.total_size == 2


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DP_REPLICATE_SIZE": "2",
        "DP_SHARD_SIZE": "3",
        "TP_SIZE": "4",
        "CP_SIZE": "5",
        "CP_COMM_STRATEGY": "alltoall",
        "SP_SEQ_LENGTH": "64",
        "SP_SEQ_LENGTH_IS_VARIABLE": "false",
        "SP_ATTN_IMPLEMENTATION": "sdpa",
    }.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}", value)
    config = ParallelismConfig(tp_size=1)
    assert config._sizes == {"dp_replicate": 2, "dp_shard": 3, "tp": 1, "cp": 5, "sp": 1}
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="alltoall")
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(64, False, "sdpa")


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (ParallelismConfig, {"dp_shard_size": 0}, "dp_shard_size is 0"),
        (ParallelismConfig, {"tp_size": "two"}, "tp_size is 'two'"),
        (ParallelismConfig, {"cp_size": 2, "sp_size": 2}, "both split the sequence"),
        (ParallelismConfig, {"dp_replicate_size": 2, "tp_size": 2}, "tp_size=2 cannot be combined with whole copies"),
        (ParallelismConfig, {"cp_size": 2, "cp_backend": "x"}, "cp_backend is 'x'"),
        (ParallelismConfig, {"sp_size": 2, "sp_backend": "x"}, "sp_backend is 'x'"),
        (TorchContextParallelConfig, {"cp_comm_strategy": "x"}, "cp_comm_strategy is 'x'"),
        (DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "eager"}, "cannot be split along the sequence"),
        (DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "x"}, "cannot be split along the sequence"),
        (DeepSpeedSequenceParallelConfig, {"sp_seq_length_is_variable": False}, "pass sp_seq_length"),
    ],
)
def test_refuses(kind: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        kind(**given)
    assert "\n" not in str(caught.value)


def test_the_mesh_wants_to_know_the_device() -> None:
    assert ParallelismConfig().build_device_mesh("cpu") is None
    with pytest.raises(ValueError, match="pass the kind of device"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_small_ones() -> None:
    assert TorchTensorParallelPlugin() == TorchTensorParallelPlugin(tp_size=1, torch_device_mesh=None)
    with pytest.warns(UserWarning, match="enable_async_tp"):
        TorchTensorParallelConfig(enable_async_tp=True)
    kernel = "kernels-community/flash-attn2"
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=kernel).sp_attn_implementation == kernel


class Mesh:
    """Notes which axes are joined, and in which order."""

    def __init__(self, device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> None:
        self.made = (device, sizes, mesh_dim_names)
        self.joined: list[tuple[Any, str]] = []

    def __getitem__(self, axes: Any) -> Any:
        return SimpleNamespace(_flatten=lambda name: self.joined.append((axes, name)))


def test_axes_are_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", Mesh)
    config = ParallelismConfig(tp_size=2, cp_size=3, dp_shard_size=4, dp_replicate_size=5)
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (5, 4, 3, 2))
    mesh: Any = config.build_device_mesh("cpu")
    assert mesh.made == ("cpu", (5, 4, 3, 2), ("dp_replicate", "dp_shard", "cp", "tp"))
    assert mesh.joined == [
        (["dp_replicate", "dp_shard"], "dp"),
        (["dp_shard", "cp"], "dp_shard_cp"),
        (["dp_replicate", "dp_shard", "cp"], "dp_cp"),
    ]
    assert ParallelismConfig()._get_mesh() == ()
    assert ParallelismConfig().build_device_mesh("cpu") is None
