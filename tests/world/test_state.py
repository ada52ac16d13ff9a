"""The state of processes that form a world."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator
from accelerate.comm import ops
from accelerate.config.enums import DistributedType
from accelerate.config.handlers import InitProcessGroupKwargs
from accelerate.state import AcceleratorState, PartialState
from tests.harness import run_world


def _place() -> tuple[Any, ...]:
    state = PartialState()
    assert state.distributed_type == DistributedType.MULTI_CPU and state.use_distributed
    assert state.backend == "gloo" and state.device == torch.device("cpu")
    assert "Backend: gloo" in repr(state) and f"Process index: {state.process_index}\n" in repr(state)
    return (
        state.process_index,
        state.num_processes,
        state.is_main_process,
        state.is_local_main_process,
        state.is_last_process,
    )


@pytest.mark.parametrize("processes", [2, 3])
def test_place(processes: int) -> None:
    last = processes - 1
    assert run_world(_place, processes) == [(r, processes, r == 0, r == 0, r == last) for r in range(processes)]


def _decorators() -> list[str]:
    state = PartialState()
    ran: list[str] = []

    def note(word: str) -> Any:
        def function(extra: str = "") -> str:
            ran.append(word + extra)
            return word

        return function

    state.on_main_process(note("main"))("!")
    state.on_main_process()(note("main()"))()
    state.on_local_main_process(note("local main"))()
    state.on_local_main_process()(note("local main()"))()
    state.on_last_process(note("last"))()
    state.on_process(note("1"), process_index=1)()
    state.on_process(process_index=1)(note("1()"))()
    state.on_local_process(note("local 1"), local_process_index=1)()
    state.on_local_process(local_process_index=1)(note("local 1()"))()
    assert state.on_process(note("nobody"), process_index=9)(extra="x") is None
    return ran


def test_decorators() -> None:
    assert run_world(_decorators, 3) == [
        ["main!", "main()", "local main", "local main()"],
        ["1", "1()", "local 1", "local 1()"],
        ["last"],
    ]


def _first(folder: str, fails: bool) -> list[str]:
    state = PartialState()
    log = Path(folder, "log")
    try:
        with state.main_process_first():
            with log.open("a") as file:
                file.write("main\n" if state.is_main_process else "other\n")
            if fails and state.is_main_process:
                raise KeyError("inside the block")
    except KeyError:
        assert fails and state.is_main_process
    state.wait_for_everyone()
    return log.read_text().splitlines()


@pytest.mark.parametrize("fails", [False, True])
def test_the_main_process_goes_first_even_if_it_fails(tmp_path: Path, fails: bool) -> None:
    assert run_world(_first, 3, str(tmp_path), fails) == [["main", "other", "other"]] * 3


def _split() -> list[Any]:
    state = PartialState()
    found: list[Any] = []
    data: dict[str, Any] = {"a": [1, 2, 3, 4], "b": torch.arange(4)}
    with state.split_between_processes(data) as part:
        found.append((part["a"], part["b"].tolist()))
    with state.split_between_processes(["x", "y"], apply_padding=True) as part:
        found.append(part)
    assert data["a"] == [1, 2, 3, 4] and len(data["b"]) == 4
    return found


def test_split_between_processes() -> None:
    assert run_world(_split, 3) == [
        [([1, 2], [0, 1]), ["x"]],
        [([3], [2]), ["y"]],
        [([4], [3]), ["y"]],
    ]
    assert run_world(_split, 2) == [
        [([1, 2], [0, 1]), ["x"]],
        [([3, 4], [2, 3]), ["y"]],
    ]


def _own_group() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    assert accelerator.num_processes == 2 and accelerator.state.backend == "gloo"
    assert accelerator.gather(torch.tensor(accelerator.process_index)).tolist() == [0, 1]


def test_a_group_that_the_script_made_is_used() -> None:
    run_world(_own_group, 2)


def _own_group_without_a_launcher(store: str) -> tuple[Any, ...]:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = PartialState()
    assert ops.gather(torch.tensor(rank)).tolist() == [0, 1]
    return state.process_index, state.local_process_index, state.is_local_main_process


def test_a_group_without_a_launcher_is_one_machine(tmp_path: Path) -> None:
    assert run_world(_own_group_without_a_launcher, 2, str(tmp_path / "store")) == [(0, 0, True), (1, 1, False)]


def _init_arguments(store: str) -> None:
    handler = InitProcessGroupKwargs(backend="gloo", init_method=f"file://{store}", timeout=timedelta(seconds=42))
    del os.environ["MASTER_ADDR"]  # no way to meet but the file
    accelerator = Accelerator(kwargs_handlers=[handler])
    assert accelerator.gather(torch.tensor(accelerator.process_index)).tolist() == [0, 1]
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=42)


def test_arguments_for_the_process_group(tmp_path: Path) -> None:
    run_world(_init_arguments, 2, str(tmp_path / "store"))


def _second_arguments() -> None:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=42))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the group has is no news
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=42))])
        PartialState(timeout=timedelta(seconds=42))
    with pytest.warns(UserWarning, match=r"cannot take timeout='0:00:07' \(it has '0:00:42'\)"):
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=7))])
    with pytest.warns(UserWarning, match=r"cannot take backend='mpi' \(it has 'gloo'\): pass it to the first"):
        PartialState(backend="mpi")


def test_a_group_that_exists_says_what_it_cannot_take() -> None:
    run_world(_second_arguments, 2)


def _end() -> None:
    accelerator = Accelerator()
    assert dist.is_initialized()
    accelerator.end_training()
    accelerator.end_training()
    accelerator.state.destroy_process_group()
    assert not dist.is_initialized()
    assert accelerator.process_index == int(os.environ["RANK"]), "who we were is still known"


def test_end_training_twice() -> None:
    run_world(_end, 2)


def _sub_group() -> None:
    state = PartialState()
    group = dist.new_group([0, 1])
    state.destroy_process_group(group)
    assert dist.is_initialized()
    assert ops.gather(torch.tensor(state.process_index)).tolist() == [0, 1]


def test_destroying_a_sub_group_leaves_the_main_one() -> None:
    run_world(_sub_group, 2)


def _start_again() -> None:
    Accelerator()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.num_processes == 2 and accelerator.mixed_precision == "bf16"
    assert accelerator.gather(torch.tensor(accelerator.process_index)).tolist() == [0, 1]
    accelerator.end_training()
    AcceleratorState._reset_state(True)


def test_a_reset_state_finds_the_group_again() -> None:
    run_world(_start_again, 2)


def _collective_first() -> list[int]:
    result: list[int] = ops.gather(torch.tensor(int(os.environ["RANK"]))).tolist()
    return result


def test_a_collective_before_any_state_sets_the_process_up() -> None:
    assert run_world(_collective_first, 2) == [[0, 1], [0, 1]]


def _printed() -> None:
    PartialState().print("hello")


def test_print_is_once_per_machine() -> None:
    from tests.harness import world_outcomes

    assert [outcome.output for outcome in world_outcomes(_printed, 2)] == ["hello", ""]


def _missing_rank() -> str:
    os.environ["WORLD_SIZE"] = "3"
    with pytest.raises(RuntimeError) as caught:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=1))])
    assert PartialState._shared_state == {}
    return str(caught.value)


def test_a_rank_that_never_comes() -> None:
    for rank, text in enumerate(run_world(_missing_rank, 2, timeout=30)):
        assert f"Rank {rank} of 3" in text and "InitProcessGroupKwargs" in text
