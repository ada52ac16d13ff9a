"""The FSDP plugin: fields, variables, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.config.fsdp_values import give_memory
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)

FULL = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
SHARDED = fsdp.ShardedStateDictConfig(offload_to_cpu=True)


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the plugin sets is undone after each test.
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


DEFAULTS: dict[int, dict[str, Any]] = {
    1: {
        "sharding_strategy": fsdp.ShardingStrategy.FULL_SHARD,
        "reshard_after_forward": None,
        "cpu_offload": fsdp.CPUOffload(offload_params=False),
        "state_dict_type": fsdp.StateDictType.FULL_STATE_DICT,
        "state_dict_config": FULL,
        "optim_state_dict_config": fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        "use_orig_params": False,
        "sync_module_states": False,
        "forward_prefetch": False,
    },
    2: {
        "sharding_strategy": None,
        "reshard_after_forward": True,
        "cpu_offload": fsdp.OffloadPolicy(),
        "state_dict_type": fsdp.StateDictType.SHARDED_STATE_DICT,
        "state_dict_config": SHARDED,
        "optim_state_dict_config": fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True),
        "use_orig_params": None,
        "sync_module_states": None,
        "forward_prefetch": None,
    },
}
BOTH: dict[str, Any] = {
    "backward_prefetch": None,
    "mixed_precision_policy": None,
    "auto_wrap_policy": None,
    "ignored_modules": None,
    "limit_all_gathers": True,
    "param_init_fn": None,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": None,
    "xla_fsdp_settings": None,
    "xla_fsdp_grad_ckpt": False,
}

S, B, T = fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType


def _changes(version: int, **given: Any) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **given)
    expected = {"fsdp_version": version, **BOTH, **DEFAULTS[version]}
    found = {name: value for name, value in vars(plugin).items() if not name.startswith("_")}
    assert found.keys() == expected.keys()
    return {name: value for name, value in found.items() if value != expected[name]}


@pytest.mark.parametrize("version", [1, 2])
def test_defaults(version: int) -> None:
    assert _changes(version) == {}


@pytest.mark.parametrize(
    ("version", "given", "changed"),
    [
        (1, {"sharding_strategy": "shard_grad_op"}, {"sharding_strategy": S.SHARD_GRAD_OP}),
        (1, {"sharding_strategy": "2"}, {"sharding_strategy": S.SHARD_GRAD_OP}),
        (1, {"sharding_strategy": S.NO_SHARD}, {"sharding_strategy": S.NO_SHARD}),
        (1, {"sharding_strategy": "HYBRID_SHARD_ZERO2"}, {"sharding_strategy": S._HYBRID_SHARD_ZERO2}),
        (1, {"reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": S.SHARD_GRAD_OP}),
        (1, {"backward_prefetch": "backward_post"}, {"backward_prefetch": B.BACKWARD_POST}),
        (1, {"backward_prefetch": 1}, {"backward_prefetch": B.BACKWARD_PRE}),
        (1, {"backward_prefetch": "NO_PREFETCH"}, {}),
        (1, {"cpu_offload": True}, {"cpu_offload": fsdp.CPUOffload(offload_params=True)}),
        (1, {"use_orig_params": True}, {"use_orig_params": True}),
        (
            1,
            {"cpu_ram_efficient_loading": True},
            {"cpu_ram_efficient_loading": True, "sync_module_states": True, "param_init_fn": give_memory},
        ),
        (2, {"reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        (2, {"reshard_after_forward": True}, {}),
        (2, {"cpu_offload": True}, {"cpu_offload": fsdp.CPUOffloadPolicy(pin_memory=True)}),
        (2, {"cpu_ram_efficient_loading": True}, {"cpu_ram_efficient_loading": True}),
        (2, {"auto_wrap_policy": "no_wrap"}, {}),
        (
            2,
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "A,B"},
            {"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": ["A", "B"]},
        ),
        (
            1,
            {"transformer_cls_names_to_wrap": ["A"]},
            {"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": ["A"]},
        ),
        (
            2,
            {"auto_wrap_policy": "SIZE_BASED_WRAP"},
            {"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 0},
        ),
        (
            2,
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        ),
        (1, {"ignored_modules": ".*head"}, {"ignored_modules": ".*head"}),
        (
            2,
            {"xla_fsdp_settings": {"shard_param_on_dim_0": True}},
            {"xla_fsdp_settings": {"shard_param_on_dim_0": True}},
        ),
        (2, {"xla_fsdp_grad_ckpt": True}, {"xla_fsdp_grad_ckpt": True}),
    ],
)
def test_arguments(version: int, given: dict[str, Any], changed: dict[str, Any]) -> None:
    assert _changes(version, **given) == changed


@pytest.mark.parametrize(
    ("version", "variable", "value", "changed"),
    [
        (1, "SHARDING_STRATEGY", "2", {"sharding_strategy": S.SHARD_GRAD_OP}),
        (2, "SHARDING_STRATEGY", "2", {}),
        (2, "RESHARD_AFTER_FORWARD", "false", {"reshard_after_forward": False}),
        (1, "BACKWARD_PREFETCH", "BACKWARD_PRE", {"backward_prefetch": B.BACKWARD_PRE}),
        (1, "FORWARD_PREFETCH", "true", {"forward_prefetch": True}),
        (2, "FORWARD_PREFETCH", "true", {}),
        (1, "USE_ORIG_PARAMS", "true", {"use_orig_params": True}),
        (1, "SYNC_MODULE_STATES", "true", {"sync_module_states": True, "param_init_fn": give_memory}),
        (2, "SYNC_MODULE_STATES", "true", {}),
        (1, "OFFLOAD_PARAMS", "true", {"cpu_offload": fsdp.CPUOffload(offload_params=True)}),
        (2, "OFFLOAD_PARAMS", "true", {"cpu_offload": fsdp.CPUOffloadPolicy()}),
        (2, "ACTIVATION_CHECKPOINTING", "true", {"activation_checkpointing": True}),
        (2, "CPU_RAM_EFFICIENT_LOADING", "true", {"cpu_ram_efficient_loading": True}),
        (1, "IGNORED_MODULES", ".*head", {"ignored_modules": ".*head"}),
        (2, "TRANSFORMER_CLS_TO_WRAP", "A", {}),
        (2, "XLA_FSDP_GRAD_CKPT", "true", {"xla_fsdp_grad_ckpt": True}),
        (
            2,
            "XLA_FSDP_SETTINGS",
            '{"shard_param_on_dim_0": false}',
            {"xla_fsdp_settings": {"shard_param_on_dim_0": False}},
        ),
        (
            2,
            "STATE_DICT_TYPE",
            "FULL_STATE_DICT",
            {
                "state_dict_type": T.FULL_STATE_DICT,
                "state_dict_config": FULL,
                "optim_state_dict_config": fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
            },
        ),
    ],
)
def test_variables(version: int, variable: str, value: str, changed: dict[str, Any]) -> None:
    os.environ["FSDP_" + variable] = value
    assert _changes(version) == changed


def test_variables_that_belong_together() -> None:
    os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "A, B"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.transformer_cls_names_to_wrap == ["A", "B"]
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "200"}
    assert FullyShardedDataParallelPlugin().min_num_params == 200


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fsdp_version": 3}, "fsdp_version is 3"),
        ({"sharding_strategy": "bad"}, "sharding_strategy is 'bad': choose one of FULL_SHARD"),
        ({"reshard_after_forward": True}, "reshard_after_forward=True is for FSDP version 2"),
        ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"}, "is for FSDP version 1"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "cannot be read"),
        ({"fsdp_version": 2, "reshard_after_forward": 1}, "takes True or False"),
        ({"backward_prefetch": "x"}, "backward_prefetch is 'x'"),
        ({"cpu_offload": fsdp.CPUOffloadPolicy()}, "takes True, False or a `torch.distributed.fsdp.CPUOffload`"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload(True)}, "OffloadPolicy"),
        ({"auto_wrap_policy": "x"}, "auto_wrap_policy is 'x'"),
        ({"state_dict_type": "x"}, "state_dict_type is 'x'"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT: FSDP version 2 knows"),
        ({"mixed_precision_policy": "x"}, "The mixed precision is 'x'"),
        ({"mixed_precision_policy": {"param_dtype": torch.int8}}, "The mixed precision is torch.int8"),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": "x"}, "min_num_params is 'x'"),
        ({"mixed_precision_policy": {"output_dtype": "bf16"}}, "has output_dtype"),
        ({"mixed_precision_policy": fsdp.MixedPrecisionPolicy()}, "FSDP version 1 takes a name"),
        ({"xla_fsdp_settings": "x"}, "xla_fsdp_settings is 'x': give a dict"),
        ({"xla_fsdp_settings": {"shard_params_on_dim_0": True}}, "did you mean `shard_param_on_dim_0`"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "pass `mixed_precision` to the Accelerator"),
        ({"xla_fsdp_settings": {"flatten_parameters": True}}, "XLA decides that by itself"),
        ({"xla_fsdp_settings": {"shard_param_on_dim_0": 1}}, "set it to true or false"),
        ({"activation_checkpointing_offload": True}, "nothing to keep on the host"),
        ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, "is for FSDP version 2"),
    ],
)
def test_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")) as caught:
        FullyShardedDataParallelPlugin(**given)
    assert "\n" not in str(caught.value)


def test_settings_of_version_1_do_nothing_in_version_2() -> None:
    for name in ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"):
        with pytest.warns(UserWarning, match=f"`{name}` is a setting of FSDP version 1"):
            assert _changes(2, **{name: True}) == {}


def test_mixed_precision() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(bf16, bf16, bf16)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(bf16, bf16, bf16)
    plugin.set_mixed_precision("fp16", buffer_autocast=True, override=True)
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(torch.float16, torch.float16, fp32)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision(bf16, override=True)
    assert plugin.mixed_precision_policy == fsdp.MixedPrecisionPolicy(bf16, bf16, bf16)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy={"param_dtype": "bfloat16", "reduce_dtype": fp32}
    )
    assert plugin.mixed_precision_policy == fsdp.MixedPrecisionPolicy(bf16, fp32)


def test_state_dict_type() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    assert plugin.state_dict_type == T.FULL_STATE_DICT and plugin.state_dict_config == FULL
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type) and plugin.state_dict_config == SHARDED
    own = fsdp.FullStateDictConfig(offload_to_cpu=False)
    assert FullyShardedDataParallelPlugin(state_dict_config=own).state_dict_config is own


def test_wrap_policy_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2, batch_first=True))
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    model._no_split_modules = ["TransformerEncoderLayer"]  # type: ignore[assignment]
    plugin.set_auto_wrap_policy(model)
    policy: Any = plugin.auto_wrap_policy
    assert policy.keywords == {"transformer_layer_cls": {nn.TransformerEncoderLayer}}
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap")
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy is None
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=5)
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    assert policy.keywords == {"min_num_params": 5}


def test_loading_on_the_first_process() -> None:
    FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
    enable_fsdp_ram_efficient_loading()
    assert FullyShardedDataParallelPlugin(fsdp_version=2).cpu_ram_efficient_loading
    assert os.environ["ACCELERATE_USE_FSDP"] == "True"
    disable_fsdp_ram_efficient_loading()
    assert not FullyShardedDataParallelPlugin(fsdp_version=2).cpu_ram_efficient_loading
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    give_memory(module)
    assert module[0].weight.is_meta  # one module at a time, as torch asks for
    give_memory(module[0])
    assert not module[0].weight.is_meta


@pytest.mark.parametrize("policy", ["NO_WRAP", "SIZE_BASED_WRAP"])
def test_a_smallest_number_of_parameters_that_is_none(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", policy)
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "abc")
    with pytest.raises(ValueError, match=r"^FSDP_MIN_NUM_PARAMS is 'abc': give a whole number"):
        FullyShardedDataParallelPlugin()
