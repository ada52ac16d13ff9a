"""What some of the supported releases of torch lack: marks for tests, which name it where they skip one."""

from __future__ import annotations

import inspect
import io
import pickle
from collections import defaultdict

import pytest
import torch
from packaging.version import Version
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from accelerate.torch_internals.pipelines import waits_for_every_tensor


def _needs(there: bool, otherwise: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not there, reason=f"torch {torch.__version__} {otherwise}")


def has_dtype(name: str) -> pytest.MarkDecorator:
    return _needs(hasattr(torch, name), f"has no {name}")


def _fills(value: object) -> bool:
    """Whether `weights_only` fills what it has made empty, as pickle does with a subclass of dict."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        with torch.serialization.safe_globals([type(value), int]):
            torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


refuses_defaultdict = _needs(not _fills(defaultdict(int, a=1)), "loads a defaultdict that is allowed")
leaves_parameters_whole = _needs(
    "ignored_params" in inspect.signature(fully_shard).parameters, "shards every parameter in FSDP version 2"
)
spreads_transformers = _needs(
    "src_data_rank" in inspect.signature(distribute_tensor).parameters,
    "lacks what tensor parallelism of transformers calls",
)
stages_take_several_tensors = _needs(waits_for_every_tensor(), "hands on one tensor from stage to stage over gloo")
# What only shows while it fails; the releases between those that tests run on are taken for the older one.
_NEWER = Version(torch.__version__) >= Version("2.9")
traces_transformers = _needs(_NEWER, "cannot trace models of transformers into stages")
compiles_flat_parameters = _needs(_NEWER, "compiles no model with FSDP version 1 and flat parameters")
takes_frozen_weights_as_they_are = _needs(_NEWER, "wants one dtype of trained and frozen weights in FSDP version 2")
