"""torch.distributed.fsdp.wrap: the policies that are objects, and say which modules are wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate.torch_internals.missing import gone


def chosen_by(policy: Any, model: nn.Module, ignored: list[nn.Module]) -> set[nn.Module] | None:
    """The modules that one of torch's policies chooses; None for one that is to be called with each module.

    Without the method that they share, those that can be called still work, and others (CustomPolicy) are lost.
    """
    run: Any = getattr(policy, "_run_policy", None)
    if run is not None:
        return set(run(model, set(ignored), {}))
    if not callable(policy):
        raise gone(f"{type(policy).__name__}._run_policy", "this policy", "pass a function, or ModuleWrapPolicy")
    return None
