"""Every command line and config file of `cases.json` leads to the command and the variables written down there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from accelerate.config.options import FAMILIES, OPTIONS
from tests.unit.launch.cases import CASES, outcome


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    if "mpirun" in str(case["expected"].get("command")) and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    assert outcome(case) == case["expected"]


def test_every_variable_of_a_setting_is_in_some_case() -> None:
    told = {name for case in CASES.values() for name in case["expected"].get("env", {})}
    declared = {family.variable_of(option) for family in FAMILIES for option in family.options} - {""}
    assert len(declared) > 90
    assert declared - told == set()


def test_every_flag_is_in_some_case() -> None:
    words = {word for case in CASES.values() for word in case["argv"]}
    elsewhere = {"config_file", "dry_run", "aws_access_key_id", "aws_secret_access_key"}
    unused = {name for name, option in OPTIONS.items() if name not in elsewhere and not words & set(option.spellings)}
    assert unused == set()


def test_the_cases_name_no_folder_of_this_machine() -> None:
    text = Path(__file__).with_name("cases.json").read_text()
    assert str(Path(__file__).parents[3]) not in text
