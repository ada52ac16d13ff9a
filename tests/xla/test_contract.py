"""The checks that every strategy passes, on an XLA device."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from accelerate.comm.tree import send_to_device
from accelerate.state import AcceleratorState, GradientState, PartialState
from tests.contract.test_training import CHECKS
from tests.xla.worlds import on_several, on_xla

# These compare with what the host computes, in other places and with other rounding; see test_training.py.
OTHERWISE = ("unwraps", "leaves_evaluation_models_alone", "autocasts_outside_the_model")


def _on_its_device(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The checks hand tensors of the host to models."""
    parameter = next(module.parameters(), None)
    return inputs if parameter is None else send_to_device(inputs, parameter.device)


def passes(precision: str) -> None:
    register_module_forward_pre_hook(_on_its_device)
    for name, check in CHECKS.items():
        if name not in OTHERWISE:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            check(precision)
            assert PartialState().device.type == "xla"


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_checks_of_every_strategy(precision: str) -> None:
    assert set(OTHERWISE) < CHECKS.keys()
    on_xla(passes, precision)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_checks_on_several_devices(precision: str) -> None:
    on_several(passes, precision)


def test_the_checks_on_sharded_models() -> None:
    on_xla(passes, "bf16", CPU_NUM_DEVICES="4", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
