"""What is said where a private name that has no replacement is gone."""

from __future__ import annotations

import torch


def gone(name: str, needed_for: str, remedy: str) -> RuntimeError:
    """The error for a feature that a release of torch has taken the ground from.

    Args:
        name: the private name that is not there.
        needed_for: the feature, as in "saving inside an accumulation window under FSDP version 1".
        remedy: what to do instead.
    """
    return RuntimeError(f"torch {torch.__version__} has no {name}, which {needed_for} needs: {remedy}.")
