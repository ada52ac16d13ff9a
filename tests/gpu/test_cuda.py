"""The GPU checks under pytest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import checks
from tests.gpu.run import run_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_one_process(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("processes", "check"), checks.WORLDS, ids=lambda value: getattr(value, "__name__", value))
def test_in_a_world(processes: int, check: Callable[[], None]) -> None:
    error = run_world(processes, check.__name__)
    assert error is None, error
