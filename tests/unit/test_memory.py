import gc
import weakref
from typing import Any

import pytest
import torch

from accelerate.memory import find_executable_batch_size, release_memory, should_reduce_batch_size
from accelerate.state import PartialState, attempts
from tests.harness import run_world, world_outcomes

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20 GiB."


def fits(limit: int, sizes: list[int], **kwargs: Any) -> Any:
    @find_executable_batch_size(**kwargs)
    def train(batch_size: int, model: str = "m", *rest: Any) -> tuple[int, str]:
        sizes.append(batch_size)
        if batch_size > limit:
            raise RuntimeError(OUT_OF_MEMORY)
        return batch_size, model

    return train


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(OUT_OF_MEMORY),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("anything"),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception) -> None:
    assert should_reduce_batch_size(error)


@pytest.mark.parametrize("error", [ValueError(OUT_OF_MEMORY), RuntimeError("a", OUT_OF_MEMORY), RuntimeError("x")])
def test_what_does_not(error: Exception) -> None:
    assert not should_reduce_batch_size(error)


def test_sizes_shrink_until_one_fits() -> None:
    sizes: list[int] = []
    train = fits(8, sizes, starting_batch_size=16)
    assert train("model") == (8, "model")
    assert sizes == [16, 14, 12, 10, 9, 8]
    # What was found is kept for the next call.
    assert train() == (8, "m")
    assert sizes[-2:] == [8, 8]


@pytest.mark.parametrize(("size", "kind"), [("8", "a str"), (None, "a NoneType"), ([8], "a list")])
def test_a_size_that_is_no_number_is_refused_where_the_function_is_decorated(size: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^starting_batch_size is {kind}: give a whole number"):
        fits(8, [], starting_batch_size=size)


def test_a_batch_size_in_the_place_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"given an int for the function: write `starting_batch_size=16`\.$"):
        find_executable_batch_size(16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"given a str for the function: pass a function\.$"):
        find_executable_batch_size("train")  # type: ignore[arg-type]


def test_own_way_to_shrink() -> None:
    sizes: list[int] = []
    train = fits(4, sizes, starting_batch_size=64, reduce_batch_size_fn=lambda: sizes[-1] // 2)
    assert train() == (4, "m")
    assert sizes == [64, 32, 16, 8, 4]


def test_nothing_fits() -> None:
    with pytest.raises(RuntimeError, match="No batch size fits"):
        fits(0, [], starting_batch_size=2)()


def test_other_errors_pass_through() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise KeyError(batch_size)

    with pytest.raises(KeyError, match="128"):
        train()


def test_the_batch_size_is_not_the_callers_to_give() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"`train\(model='m'\)`"):
        train(128, "m")
    with pytest.raises(TypeError, match="model"):
        train()


def test_a_function_that_has_no_place_for_the_batch_size() -> None:
    @find_executable_batch_size
    def train() -> None: ...

    with pytest.raises(TypeError, match="`train` has no parameter for the batch size"):
        train()


def test_no_state_comes_to_be() -> None:
    assert fits(200, [])() == (128, "m")
    assert not PartialState._shared_state


def test_a_failed_attempt_holds_no_memory() -> None:
    alive: list[bool] = []
    references: list[Any] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        alive.extend(reference() is not None for reference in references)
        tensor = torch.ones(batch_size)
        references.append(weakref.ref(tensor))
        if batch_size > 3:
            raise RuntimeError(OUT_OF_MEMORY)
        return batch_size

    assert train() == 3
    assert alive == [False]


def test_releasing() -> None:
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    tensor, other = release_memory(tensor, [1])  # type: ignore[assignment]
    gc.collect()
    assert (tensor, other, reference()) == (None, None, None)


def search(limits: list[int]) -> tuple[int, list[int]]:
    rank = PartialState().process_index
    sizes: list[int] = []
    size, _ = fits(limits[rank], sizes, starting_batch_size=16)()
    return size, sizes


def test_ranks_go_on_with_the_smallest_size() -> None:
    (first, sizes), (second, others) = run_world(search, 2, [16, 10])
    assert (first, second) == (10, 10)
    assert sizes == others == [16, 14, 12, 10]


def fail_on_rank_one() -> None:
    rank = PartialState().process_index

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        if rank == 1:
            raise KeyError("lost")

    train()


def test_an_error_on_one_rank_ends_the_search_on_all() -> None:
    first, second = world_outcomes(fail_on_rank_one, 2)
    assert (second.error, first.error) == ("KeyError", "RuntimeError")
    assert "rank 1 (KeyError: 'lost')" in first.message


@pytest.mark.parametrize("gone", [RuntimeError, ConnectionRefusedError])
def test_an_error_is_not_hidden_by_a_store_that_is_gone(gone: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(self: Any, report: Any) -> Any:
        raise gone("no answer")

    monkeypatch.setattr(attempts.Attempt, "exchange", exchange)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        raise KeyError("of the script")

    with pytest.raises(KeyError, match="of the script"):
        train()
