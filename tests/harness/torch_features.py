"""What some of the supported releases of torch lack: marks for tests, which name it where they skip one."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict

import pytest
import torch


def has_dtype(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(torch, name), reason=f"torch {torch.__version__} has no {name}")


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


refuses_defaultdict = pytest.mark.skipif(
    _fills(defaultdict(int, a=1)), reason=f"torch {torch.__version__} loads a defaultdict that is allowed"
)
