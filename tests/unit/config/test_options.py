"""One declaration per setting: flag, key, variable, question and check come from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.config.file import ClusterConfig
from accelerate.config.options import FAMILIES, OPTIONS, SECTIONS, family_of, option


def test_every_setting_has_its_flag_with_help() -> None:
    actions = launch_command_parser()._actions
    for name, declared in OPTIONS.items():
        mine = [action for action in actions if action.dest == name]
        assert all(action.default == declared.default for action in mine)
        assert {*declared.spellings} <= {flag for action in mine for flag in action.option_strings}, name
        assert declared.help


def test_names_and_variables_are_declared_once() -> None:
    names = [declared.name for family in FAMILIES for declared in family.options]
    variables = [name for family in FAMILIES for declared in family.options if (name := family.variable_of(declared))]
    assert len(names) == len(set(names))
    assert len(variables) == len(set(variables))


def test_every_key_has_its_place_in_the_config() -> None:
    fields = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert set(SECTIONS) <= fields
    for name, declared in OPTIONS.items():
        if not family_of(name).section and declared.file_key:
            assert declared.file_key in fields, f"{name} should be kept as {declared.file_key}"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("num_processes", "4", 4),
        ("gradient_clipping", "0.5", 0.5),
        ("mixed_precision", "BF16", "bf16"),
        ("dynamo_backend", "INDUCTOR", "inductor"),
        ("fsdp_version", 2, "2"),
        ("fsdp_offload_params", True, "true"),
        ("fsdp_offload_params", "no", "false"),
        ("megatron_lm_no_load_optim", "false", False),
        ("fp8_override_linear_precision", "true,no,1", (True, False, True)),
        ("downcast_bf16", "no", False),
        ("num_machines", None, None),
    ],
)
def test_values_are_read(name: str, given: Any, expected: Any) -> None:
    assert option(name).check(given) == expected


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("num_processes", "two", "`--num_processes` should be a whole number of at least 1, not 'two'"),
        ("num_processes", 1.5, "should be a whole number of at least 1, not 1.5"),
        ("mixed_precision", "fp17", "should be one of no, fp16, bf16, fp8, not 'fp17'"),
        ("fsdp_offload_params", "perhaps", "should be yes or no, not 'perhaps'"),
        ("fp8_override_linear_precision", "true", "three values of yes or no"),
    ],
)
def test_wrong_values_are_named(name: str, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        option(name).check(given)


def test_keys_of_a_section_may_leave_out_its_prefix() -> None:
    fsdp = SECTIONS["fsdp_config"]
    assert fsdp.option_for_key("fsdp_version") is fsdp.option_for_key("version") is option("fsdp_version")
    assert fsdp.option_for_key("nonsense") is None
