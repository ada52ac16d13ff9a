"""Checks the communication hooks of DDP: the gradients are those without a hook, and went through its number format.

`accelerate launch --num_processes 2 test_ddp_comm_hook.py`; it needs at least two processes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from accelerate.accelerator import Accelerator
from accelerate.config.enums import DDPCommunicationHookType as Hook
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils.checks import expect, needs, run_checks

FORMATS = {Hook.FP16: torch.float16, Hook.BF16: torch.bfloat16}


class MockModel(torch.nn.Module):
    """One weight, whose gradient differs from process to process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.randn(40, 20))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the weight times a power of the input."""
        return self.p * x.pow(rank + 1)


def _run_and_get_grads(model: torch.nn.Module, rank: int) -> torch.Tensor:
    weight = next(model.parameters())
    torch.manual_seed(2024)
    model(torch.randn(40, 20).to(weight.device), rank).sum().backward()
    if weight.grad is None:
        raise AssertionError("the backward pass left no gradient")
    return weight.grad


def test_ddp_comm_hook(comm_hook: Hook, comm_wrapper: Any, comm_state_option: dict[str, Any]) -> None:
    """Compares the gradients of a hook with those of plain DDP."""
    AcceleratorState._reset_state()
    settings = DistributedDataParallelKwargs(
        comm_hook=comm_hook, comm_wrapper=comm_wrapper, comm_state_option=comm_state_option
    )
    accelerator = Accelerator(kwargs_handlers=[settings])
    needs(accelerator.num_processes > 1, "several processes")
    on_gpu = accelerator.device.type in ("cuda", "xpu")
    needs(on_gpu or Hook.BF16 not in (comm_hook, comm_wrapper), "a GPU, because torch refuses bf16 elsewhere")
    rank = accelerator.process_index
    seen = _run_and_get_grads(accelerator.prepare(MockModel()), rank)
    plain = torch.nn.parallel.DistributedDataParallel(MockModel().to(accelerator.device))
    wanted = _run_and_get_grads(plain, rank)
    torch.testing.assert_close(seen, wanted, rtol=2e-2, atol=2e-2)
    half = FORMATS.get(comm_hook) or FORMATS.get(comm_wrapper)
    expect(half is None or torch.equal(seen.to(half).float(), seen), f"the gradients did not travel as {half}")
    expect(half is None or not torch.equal(seen, wanted), f"the gradients are exact, and so were never {half}")


def main() -> None:
    """Runs every hook, alone and inside each wrapper."""
    PartialState()
    power = (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD)
    settings: list[tuple[Hook, Hook, dict[str, Any]]] = [
        *((hook, Hook.NO, {}) for hook in (Hook.NO, Hook.FP16, Hook.BF16)),
        *((hook, wrapper, {}) for hook in power for wrapper in (Hook.NO, Hook.FP16, Hook.BF16)),
        (Hook.POWER_SGD, Hook.NO, {"matrix_approximation_rank": 2}),
    ]
    for hook, wrapper, options in settings:
        named: dict[str, Any] = {"comm_hook": hook, "comm_wrapper": wrapper, "comm_state_option": options}
        run_checks(functools.partial(test_ddp_comm_hook, **named))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
