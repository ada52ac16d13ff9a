"""Checks the operations on tensors of all processes, with values that tell where they come from.

`accelerate launch test_ops.py`; any number of processes.
"""

from __future__ import annotations

import functools

import torch

from accelerate.comm import current, ops, set_current
from accelerate.comm.checked import Checked
from accelerate.errors import DistributedOperationException
from accelerate.state import PartialState
from accelerate.test_utils.cases import assert_exception
from accelerate.test_utils.checks import expect_equal, needs, run_checks


def create_tensor(state: PartialState) -> torch.Tensor:
    """As many numbers as there are processes: the first one's begin at 1, and each next one's where those end."""
    size = state.num_processes
    return torch.arange(size, dtype=torch.float32, device=state.device) + (1 + size * state.process_index)


def _of_all(state: PartialState) -> torch.Tensor:
    """The tensors of all processes, a row each."""
    size = state.num_processes
    return torch.arange(1, size * size + 1, dtype=torch.float32, device=state.device).view(size, size)


def test_gather(state: PartialState) -> None:
    """The tensors of all, in the order of the processes, at any depth; also of different lengths."""
    gathered = ops.gather({"deep": [create_tensor(state)]})
    expect_equal(gathered["deep"][0], _of_all(state).flatten(), "gather")
    uneven = ops.gather(torch.full((state.process_index + 1,), state.process_index, device=state.device))
    wanted = [rank for rank in range(state.num_processes) for _ in range(rank + 1)]
    expect_equal(uneven.tolist(), wanted, "gather of different lengths")


def test_gather_object(state: PartialState) -> None:
    """The objects of all, in the order of the processes."""
    gathered = ops.gather_object([{"rank": state.process_index}])
    expect_equal(gathered, [{"rank": rank} for rank in range(state.num_processes)], "gather_object")


def test_gather_non_contiguous(state: PartialState) -> None:
    """A transposed tensor arrives as it looks, not as it lies in memory."""
    turned = torch.arange(12, device=state.device).view(4, 3).t() + 100 * state.process_index
    wanted = torch.cat([turned % 100 + 100 * rank for rank in range(state.num_processes)])
    expect_equal(ops.gather(turned), wanted, "gather of a transposed tensor")


def test_broadcast(state: PartialState) -> None:
    """All have the tensor of the first process, or of the one that is named."""
    for rank in (0, state.num_processes - 1):
        seen = ops.broadcast(create_tensor(state), from_process=rank)
        expect_equal(seen, _of_all(state)[rank], f"broadcast from {rank}")


def test_pad_across_processes(state: PartialState) -> None:
    """Shorter tensors are filled up to the longest one, at the end or in front."""
    longest = state.num_processes
    mine = torch.arange(1, longest + 1 - state.process_index, device=state.device)
    zeros = [0] * state.process_index
    expect_equal(ops.pad_across_processes(mine).tolist(), mine.tolist() + zeros, "padding")
    seen = ops.pad_across_processes(mine, pad_first=True)
    expect_equal(seen.tolist(), zeros + mine.tolist(), "padding in front")


def test_reduce_sum(state: PartialState) -> None:
    """Position by position, the sum over the processes."""
    expect_equal(ops.reduce(create_tensor(state), "sum"), _of_all(state).sum(0), "sum")


def test_reduce_mean(state: PartialState) -> None:
    """Position by position, the mean over the processes."""
    expect_equal(ops.reduce(create_tensor(state), "mean"), _of_all(state).mean(0), "mean")


def test_reduce_max(state: PartialState) -> None:
    """Position by position, the largest of all processes."""
    expect_equal(ops.reduce(create_tensor(state), "max"), _of_all(state).amax(0), "maximum")


def test_op_checker(state: PartialState) -> None:
    """In debug mode, shapes that do not fit are an exception on every process, instead of a hang or of garbage."""
    needs(state.num_processes > 1, "several processes")
    own = torch.ones((1,) * (2 + min(state.process_index, 1)), device=state.device)
    plain = current()
    set_current(Checked(plain))  # type: ignore[arg-type]
    try:
        for operation in (functools.partial(ops.pad_across_processes, dim=0), ops.reduce, ops.broadcast):
            with assert_exception(DistributedOperationException):
                operation({"tensor": own})
    finally:
        set_current(plain)


def test_copy_tensor_to_devices(state: PartialState) -> None:
    """A tensor that only one process has arrives at all."""
    numbers = torch.tensor([1, 2, 3], device=state.device)
    seen = ops.copy_tensor_to_devices(numbers if state.is_last_process else None)
    expect_equal(seen, numbers, "a tensor of the last process")


def main() -> None:
    """Runs all checks."""
    state = PartialState()
    run_checks(
        test_gather,
        test_gather_object,
        test_gather_non_contiguous,
        test_broadcast,
        test_pad_across_processes,
        test_reduce_sum,
        test_reduce_mean,
        test_reduce_max,
        test_op_checker,
        test_copy_tensor_to_devices,
        given=(state,),
    )
    state.destroy_process_group()


def _mp_fn(index: int) -> None:
    """What torch_xla's launcher calls on each process."""
    main()


if __name__ == "__main__":
    main()
