"""DDP: a copy of the model on every process, gradients averaged during the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate.comm import current
from accelerate.strategies.base import Strategy
from accelerate.torch_internals.ddp import expect_backward, knows_its_graph, settle_buckets, was_called
from accelerate.unwrap import find_wrapper


class DDP(Strategy):
    def wrap(self, model: torch.nn.Module, *, placed: bool) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # nothing to average, and DDP refuses it
        single = placed and self.device.type != "cpu"
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if single else None,
            output_device=self.device if single else None,
            **self.ddp.to_kwargs(),
        )
        accelerator = self.accelerator()
        if accelerator is not None and accelerator.dataloader_config.exact_resume and self.state.num_processes > 2:
            settle_buckets(wrapped, lambda yes: all(current().gather_objects(yes)))
        self.ddp.register_comm_hook(wrapped)
        return wrapped

    def micro_batch(self, model: torch.nn.Module, *, sync: bool) -> AbstractContextManager[Any] | None:
        wrapped = None if sync else find_wrapper(model, DistributedDataParallel)
        # A static graph is learned in the first backward, which has to synchronize (and may: once more does no harm).
        if wrapped is None or (wrapped.static_graph and not knows_its_graph(wrapped)):
            return None
        return _NoSync(wrapped)

    @classmethod
    def sync_in_backward(cls, model: torch.nn.Module) -> AbstractContextManager[None] | None:
        wrapped = find_wrapper(model, DistributedDataParallel)
        return None if wrapped is None else _sync(wrapped)

    def bypassed(self, models: list[torch.nn.Module]) -> set[int]:
        idle: set[int] = set()
        called: set[int] = set()
        for wrapped in filter(None, (find_wrapper(model, DistributedDataParallel) for model in models)):
            (called if was_called(wrapped) else idle).update(map(id, wrapped.parameters()))
        return idle - called  # what two wrappers share may have come through either

    def joinable(self, model: torch.nn.Module) -> bool:
        return find_wrapper(model, DistributedDataParallel) is not None

    def stand_in(self, model: torch.nn.Module) -> torch.Tensor | None:
        wrapped = find_wrapper(model, DistributedDataParallel)
        if wrapped is None:
            return None
        module = wrapped.module
        own = module.__dict__.get("forward")

        def nothing() -> torch.Tensor:
            # Every parameter takes part, with a gradient of exactly zero.
            terms = [parameter.sum() * 0.0 for parameter in module.parameters() if parameter.requires_grad]
            return torch.stack([term.float() for term in terms]).sum()

        module.forward = nothing
        try:
            loss: torch.Tensor = wrapped()
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own
        return loss


class _NoSync(AbstractContextManager[None]):
    """What `DistributedDataParallel.no_sync` does, once per micro-batch: no generator, nor a module's `__setattr__`."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.attributes = vars(wrapped)

    def __enter__(self) -> None:
        self.before = self.attributes["require_backward_grad_sync"]
        self.attributes["require_backward_grad_sync"] = False

    def __exit__(self, *error: Any) -> None:
        self.attributes["require_backward_grad_sync"] = self.before


@contextmanager
def _sync(wrapped: DistributedDataParallel) -> Iterator[None]:
    before = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
    wrapped.require_backward_grad_sync = True
    wrapped.require_forward_param_sync = True
    # The forward ran under no_sync and so did not tell the reducer to expect a backward.
    expect_backward(wrapped)
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync = before
