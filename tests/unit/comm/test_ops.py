"""Collectives in a process that runs alone."""

from __future__ import annotations

import warnings

import pytest
import torch

from accelerate.comm import ops
from accelerate.errors import CannotPadNestedTensorWarning


def test_a_nested_tensor_cannot_be_padded_by_one_process_either() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that nested tensors are new
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning) as told:
        assert ops.pad_across_processes(ragged) is ragged
    assert told[0].filename == __file__
