"""Collectives on nested data between real processes."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from accelerate.comm import current, ops
from accelerate.errors import CannotPadNestedTensorWarning, DistributedOperationException
from accelerate.state import PartialState
from accelerate.torch_internals.process_groups import collectives_begun
from tests.harness import run_world

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SMALL, LARGE = 3, 5000  # rows: within the first message, and far beyond it


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    a: Any
    b: Any


class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def rows(rank: int, count: int, dtype: torch.dtype = torch.float32, width: int = 2) -> torch.Tensor:
    """What rank `rank` brings: every rank can compute what the others do."""
    values = torch.arange(count * width).reshape(count, width) % 5 + rank
    return values.to(torch.float32).to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _gather_dtypes() -> None:
    state = PartialState()
    ranks = range(state.num_processes)
    for dtype in DTYPES:
        for count in (SMALL, LARGE):
            result = ops.gather(rows(state.process_index, count, dtype))
            assert same(result, torch.cat([rows(rank, count, dtype) for rank in ranks])), (dtype, count)
            # lengths that differ, one of them zero on rank 0
            result = ops.gather(rows(state.process_index, count * state.process_index, dtype))
            assert same(result, torch.cat([rows(rank, count * rank, dtype) for rank in ranks])), (dtype, count)


@pytest.mark.parametrize("processes", [2, 3])
def test_gather_moves_every_dtype_with_equal_and_unequal_lengths(processes: int) -> None:
    run_world(_gather_dtypes, processes)


def _gather_odd_shapes() -> None:
    state = PartialState()
    rank, ranks = state.process_index, range(state.num_processes)
    assert ops.gather(torch.tensor(rank)).tolist() == list(ranks)
    assert ops.gather(torch.tensor(rank + 0.5, requires_grad=True)).tolist() == [r + 0.5 for r in ranks]
    assert ops.gather(torch.empty(0, 4)).shape == (0, 4)
    assert ops.gather(torch.empty(2, 0, 3)).shape == (2 * len(ranks), 0, 3)
    for count in (SMALL, LARGE):
        expected = torch.cat([rows(r, count).t() for r in ranks])
        assert torch.equal(ops.gather(rows(rank, count).t()), expected)
        assert torch.equal(ops.gather(rows(rank, count)[::2]), torch.cat([rows(r, count)[::2] for r in ranks]))
        spread = rows(rank, 1).expand(count, 2)
        assert torch.equal(ops.gather(spread), torch.cat([rows(r, 1).expand(count, 2) for r in ranks]))
        leaf = rows(rank, count).requires_grad_()
        gathered = ops.gather(leaf * 2)
        assert torch.equal(gathered, torch.cat([rows(r, count) * 2 for r in ranks])) and not gathered.requires_grad
        conjugate = torch.complex(rows(rank, count), rows(rank, count)).conj()
        assert ops.gather(conjugate).imag[0, 1].item() == -1
        assert ops.gather(conjugate.imag)[0, 1].item() == -1  # a lazily negated view
        assert torch.equal(leaf.detach(), rows(rank, count)), "the input must stay as it was"


def test_gather_of_scalars_empty_views_and_gradients() -> None:
    run_world(_gather_odd_shapes, 2)


def _nested(rank: int, count: int) -> dict[str, Any]:
    leaf = rows(rank, count + rank)
    return {
        "list": [leaf, (leaf + 1,)],
        "pair": Pair(leaf, {"x": leaf.to(torch.int64)}),
        "record": Record(leaf, [leaf]),
        "output": Output(logits=leaf, loss=torch.tensor(float(rank))),
        "default": defaultdict(list, {"k": leaf}),
    }


def _gather_nested() -> None:
    state = PartialState()
    for count in (SMALL, LARGE):
        parts = [_nested(rank, count) for rank in range(state.num_processes)]
        result = ops.gather(parts[state.process_index])
        leaf = torch.cat([rows(rank, count + rank) for rank in range(state.num_processes)])
        assert torch.equal(result["list"][0], leaf) and isinstance(result["list"][1], tuple)
        assert torch.equal(result["list"][1][0], leaf + 1)
        assert type(result["pair"]) is Pair and torch.equal(result["pair"].b["x"], leaf.to(torch.int64))
        assert type(result["record"]) is Record and torch.equal(result["record"].b[0], leaf)
        assert type(result["output"]) is Output and result["output"].loss.tolist() == [0.0, 1.0, 2.0][: len(parts)]
        assert result["default"].default_factory is list and torch.equal(result["default"]["k"], leaf)
        before = _nested(state.process_index, count)
        assert torch.equal(parts[state.process_index]["list"][0], before["list"][0]), "the input must stay"
    assert ops.gather([]) == []


@pytest.mark.parametrize("processes", [2, 3])
def test_gather_keeps_every_kind_of_nesting(processes: int) -> None:
    run_world(_gather_nested, processes)


def _gather_many() -> None:
    state = PartialState()
    for count in (60, 61, 62, 200):
        # a few large ones among the small: no longer all in one message
        for large in (False, True):
            sizes = [LARGE if large and i % 50 == 7 else i % 3 for i in range(count)]
            result = ops.gather([rows(state.process_index + i, size) for i, size in enumerate(sizes)])
            for i, size in enumerate(sizes):
                assert torch.equal(result[i], torch.cat([rows(r + i, size) for r in range(state.num_processes)]))
    # small on one rank, large on the other
    size = LARGE if state.process_index else 1
    result = ops.gather([rows(state.process_index, size), torch.tensor(state.process_index)])
    assert torch.equal(result[0], torch.cat([rows(0, 1), rows(1, LARGE)])) and result[1].tolist() == [0, 1]


def test_gather_of_more_tensors_than_one_message_describes() -> None:
    run_world(_gather_many, 2)


def _gather_widths() -> None:
    rank = PartialState().process_index
    # What the first message, and the largest, have room for, and what they have not.
    for width in (2047, 2048, 2049, 131_071, 131_072, 131_073):
        for _ in range(3):
            result = ops.gather(torch.full((width,), float(rank)))
            assert torch.equal(result, torch.cat([torch.full((width,), 0.0), torch.full((width,), 1.0)])), width


def test_gather_at_the_edge_of_a_message() -> None:
    run_world(_gather_widths, 2)


def _count_collectives() -> None:
    rank = PartialState().process_index
    number, logits, text = torch.tensor(rank), torch.full((100, 300), float(rank)), ["x" * 3000 * (rank + 1)]
    uneven = torch.full((4000 * (rank + 1),), rank)

    def taken(*calls: Any) -> list[int]:
        """How many collectives each takes, when all were made twice before."""
        for _ in range(3):
            counts = []
            for call, data in calls:
                before = collectives_begun()
                call(data)
                counts.append(collectives_begun() - before)
        return counts

    gather, objects = ops.gather, ops.gather_object
    assert taken((gather, logits)) == [1] and taken((gather, uneven)) == [1] and taken((objects, text)) == [1]
    assert taken((gather, number), (gather, logits), (objects, text), (gather, uneven)) == [1, 1, 1, 1]
    assert taken((gather, torch.ones(10_000_000 // 4))) == [2]


def test_what_is_gathered_again_takes_one_collective() -> None:
    run_world(_count_collectives, 2)


def _one_rank_starts_over() -> None:
    state = PartialState()
    ranks = range(state.num_processes)
    for _ in range(3):
        for count in (SMALL, LARGE, 1):
            result = ops.gather(rows(state.process_index, count))
            assert same(result, torch.cat([rows(rank, count) for rank in ranks]))
        if state.process_index == 1:
            PartialState._reset_state()
            state = PartialState()


def test_one_rank_may_reset_its_state_between_gathers_while_the_group_lives_on() -> None:
    """What ranks expect of each other belongs to their group."""
    run_world(_one_rank_starts_over, 2)


def _disagree(kind: str) -> str:
    rank = PartialState().process_index
    last = PartialState().is_last_process
    data: Any = {
        "number": [torch.ones(2)] * (1 + last),
        "none": [] if last else [torch.ones(2)],
        "many": [torch.ones(1)] * (122 if last else 61),
        "trailing": torch.ones(2, 3 + last),
        "trailing large": torch.ones(LARGE, 3 + last),
        "dims": torch.ones(2, 3) if last else torch.ones(2),
        "dtype": torch.ones(2, dtype=torch.float64 if last else torch.float32),
        "same bytes": torch.ones(2, dtype=torch.int32 if last else torch.float32),
        "keys": {"a": torch.ones(2), "c" if last else "b": torch.ones(2)},
        "order of keys": dict.fromkeys("ba" if last else "ab", torch.ones(2)),
        "keys within": [torch.ones(2), Record(torch.ones(2), {"y" if last else "x": torch.ones(2)})],
        "keys of many": {f"{i}{'x' if last and i == 100 else ''}": torch.ones(1) for i in range(122)},
    }[kind]
    try:
        ops.gather(data)
    except DistributedOperationException as error:
        assert ops.gather(torch.tensor(rank)).tolist() == list(range(PartialState().num_processes))
        return str(error)
    return "no error"


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        "number",
        "none",
        "many",
        "trailing",
        "trailing large",
        "dims",
        "dtype",
        "same bytes",
        "keys",
        "order of keys",
        "keys within",
        "keys of many",
    ],
)
def test_ranks_that_disagree_all_get_the_same_error_and_can_go_on(kind: str, processes: int) -> None:
    texts = run_world(_disagree, processes, kind)
    assert len(set(texts)) == 1
    remedy = {"number": "the same tensors", "none": "the same tensors", "many": "the same tensors"}
    remedy |= {"dims": "same number of dimensions", "dtype": "one dtype", "same bytes": "one dtype"}
    remedy |= dict.fromkeys(
        ["keys", "order of keys", "keys within", "keys of many"], "the same keys, in the same order"
    )
    assert remedy.get(kind, "Pad them with `pad_across_processes`") in texts[0]
    for rank in range(processes):
        assert f"rank {rank} has " in texts[0]


def test_keys_that_differ_are_shown() -> None:
    assert "rank 0 has a, b; rank 1 has a, c." in run_world(_disagree, 2, "keys")[0]
    assert "rank 0 has a, b; rank 1 has b, a." in run_world(_disagree, 2, "order of keys")[0]
    assert "rank 0 has ..., 99, 100, 101, 102, ...; rank 1 has" in run_world(_disagree, 2, "keys of many")[0]


def _keys_of_other_kinds() -> None:
    rank = PartialState().process_index
    gathered = ops.gather({1: torch.tensor(rank), None: torch.tensor(rank), (2, "x"): torch.tensor(rank)})
    assert [value.tolist() for value in gathered.values()] == [[0, 1]] * 3
    assert list(gathered) == [1, None, (2, "x")]
    own = object()  # which reads differently on each rank
    assert ops.gather({own: torch.tensor(rank)})[own].tolist() == [0, 1]


def test_keys_need_not_be_strings() -> None:
    run_world(_keys_of_other_kinds, 2)


def _pad_disagree() -> str:
    rank = PartialState().process_index
    with pytest.raises(DistributedOperationException) as caught:
        ops.pad_across_processes([torch.ones(2)] * rank)
    assert ops.gather(torch.tensor(rank)).tolist() == [0, 1]
    with pytest.raises(DistributedOperationException, match=r"While running `pad_across_processes`: .*the same keys"):
        ops.pad_across_processes({"xy"[rank]: torch.ones(2)})
    assert ops.gather(torch.tensor(rank)).tolist() == [0, 1]
    return str(caught.value)


def test_padding_where_one_rank_has_no_tensor_is_an_error_everywhere() -> None:
    first, second = run_world(_pad_disagree, 2)
    assert first == second and "pad_across_processes" in first


def _objects() -> None:
    state = PartialState()
    rank, size = state.process_index, state.num_processes
    gathered = ops.gather_object([{"rank": rank}] * (rank + 1))
    assert gathered == [{"rank": r} for r in range(size) for _ in range(r + 1)]
    assert ops.gather_object([]) == []
    with pytest.raises(TypeError, match=r"would keep only the keys of a dict: .* `gather_object\(\[object\]\)`"):
        ops.gather_object({"rank": rank})
    with pytest.raises(TypeError, match=r"only the characters of a str: .* `gather_object\(\[object\]\)`"):
        ops.gather_object("abc")
    for value, kind in ((5, "an int"), (None, "a NoneType"), (b"abc", "a bytes"), (torch.tensor(1), "a Tensor")):
        with pytest.raises(TypeError, match=rf"joins lists, and was given {kind}: .* `gather_object\(\[object\]\)`"):
            ops.gather_object(value)
    # What scripts rely on: nothing of these is lost.
    assert ops.gather_object(torch.tensor([1, 2])) == ops.gather_object({1, 2}) == [1, 2] * size
    with pytest.raises(TypeError, match=r"a value of type float .* pass a tensor"):
        ops.gather(0.5)
    big = ops.gather_object(["x" * 200_000 + str(rank)])
    assert [len(item) for item in big] == [200_001] * size and big[-1][-1] == str(size - 1)
    mine: list[Any] = [rank, {"r": torch.tensor(rank)}, None]
    result = ops.broadcast_object_list(mine, from_process=1)
    assert result is mine and mine[0] == 1 and mine[1]["r"].item() == 1


@pytest.mark.parametrize("processes", [2, 3])
def test_objects(processes: int) -> None:
    run_world(_objects, processes)


def _broadcast() -> None:
    rank = PartialState().process_index
    for source in (0, 1):
        for dtype in DTYPES:
            result = ops.broadcast(rows(rank, 3, dtype), from_process=source)
            assert same(result, rows(source, 3, dtype)), (source, dtype)
        transposed = (torch.arange(6).view(2, 3) + 10 * rank).t()
        assert torch.equal(ops.broadcast(transposed, source), (torch.arange(6).view(2, 3) + 10 * source).t())
        # one rank's is a view, the other's is not: the same element must land in the same place
        mixed = transposed if rank == source else transposed.contiguous()
        assert torch.equal(ops.broadcast(mixed, source), (torch.arange(6).view(2, 3) + 10 * source).t())
        every_second = (torch.arange(10) + 10 * rank)[::2]
        assert torch.equal(ops.broadcast(every_second, source), (torch.arange(10) + 10 * source)[::2])
        nested = ops.broadcast({"a": [torch.tensor(rank)], "b": Pair(torch.ones(2) * rank, torch.empty(0))}, source)
        assert nested["a"][0].item() == source and torch.equal(nested["b"].a, torch.ones(2) * source)
        parameter = torch.nn.Parameter(torch.ones(2) * rank)
        assert ops.broadcast(parameter, source).tolist() == [source, source]


def test_broadcast() -> None:
    run_world(_broadcast, 2)


class Marked(torch.Tensor):
    """A class of somebody's own."""


def _gather_of_a_subclass() -> None:
    rank = PartialState().process_index
    for length in (3, LARGE, LARGE + rank):
        assert type(ops.gather(torch.ones(length).as_subclass(Marked))) is torch.Tensor


def test_what_is_gathered_is_a_plain_tensor_whatever_its_size() -> None:
    run_world(_gather_of_a_subclass, 2)


def _broadcast_of_other_sizes() -> None:
    rank = PartialState().process_index
    for mine in (torch.arange(1.0 + rank), [torch.ones(2), torch.ones(2, dtype=[torch.float32, torch.int64][rank])]):
        with pytest.raises(DistributedOperationException, match=r"differ between ranks: rank 0 has .*; rank 1 has .*"):
            ops.broadcast(mine)
    assert ops.broadcast(torch.full((1, 3), rank).reshape([3, 1][rank], -1)).tolist() in ([[0], [0], [0]], [[0, 0, 0]])


def test_broadcast_of_other_sizes() -> None:
    """Where a rank has another size it would be left with a part of what was sent, or wait for more."""
    run_world(_broadcast_of_other_sizes, 2)


def _broadcast_data() -> None:
    rank = PartialState().process_index
    mine = {"a": torch.arange(6).view(2, 3).t(), "n": 7, "p": Pair("x", torch.tensor(2.5))} if rank == 1 else None
    result = ops.broadcast_data(mine, from_process=1)
    assert torch.equal(result["a"], torch.arange(6).view(2, 3).t()) and result["n"] == 7
    assert type(result["p"]) is Pair and result["p"].a == "x" and result["p"].b.item() == 2.5


def test_broadcast_of_data_the_others_know_nothing_of() -> None:
    run_world(_broadcast_data, 2)


def _reduce() -> None:
    state = PartialState()
    rank, size = state.process_index, state.num_processes
    total = sum(range(size))
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.half,
        torch.bfloat16,
        torch.double,
    ):
        tensor = torch.tensor([rank, 1], dtype=torch.int64).to(dtype)
        added = ops.reduce(tensor, "sum")
        assert added.dtype == dtype and added.tolist() == [total, size], dtype
        assert tensor.tolist() == [rank, 1], "the input must stay as it was"
        mean = ops.reduce(tensor, "mean")
        torch.testing.assert_close(mean.double(), torch.tensor([total / size, 1.0]).double(), rtol=1e-2, atol=0)
        assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert ops.reduce(tensor, "none").tolist() == [rank, 1]
    nested = ops.reduce({"a": Pair(torch.tensor(float(rank)), torch.ones(2, 3).t())}, "sum")
    assert nested["a"].a.item() == total and torch.equal(nested["a"].b, torch.full((3, 2), float(size)))
    odd = ops.reduce((torch.arange(6.0) * (rank + 1)).view(2, 3).t(), "sum")
    assert torch.equal(odd, (torch.arange(6.0) * (total + size)).view(2, 3).t())
    assert not ops.reduce(torch.ones(1, requires_grad=True), "mean").requires_grad
    with pytest.raises(ValueError, match=r"'average'.*'mean', 'sum', 'max' or 'none'"):
        ops.reduce(torch.ones(1), "average")


@pytest.mark.parametrize("processes", [2, 3])
def test_reduce(processes: int) -> None:
    run_world(_reduce, processes)


def _pad() -> None:
    state = PartialState()
    rank, size = state.process_index, state.num_processes
    assert ops.pad_across_processes(torch.ones(rank + 1)).tolist() == [1.0] * (rank + 1) + [0.0] * (size - rank - 1)
    wide = torch.full((2, rank + 1), rank + 1)
    for dim in (1, -1):
        padded = ops.pad_across_processes(wide, dim=dim, pad_index=-100)
        assert padded.tolist() == [[rank + 1] * (rank + 1) + [-100] * (size - rank - 1)] * 2
        padded = ops.pad_across_processes(wide, dim=dim, pad_index=-100, pad_first=True)
        assert padded.tolist() == [[-100] * (size - rank - 1) + [rank + 1] * (rank + 1)] * 2
    assert ops.pad_across_processes(wide, dim=-2) is wide
    for dim in (2, -3):
        assert ops.pad_across_processes(wide, dim=dim) is wide
    nested = {"a": wide, "b": [torch.ones(rank, 2, dtype=torch.bool)], "c": torch.tensor(3)}
    padded = ops.pad_across_processes(nested, dim=0)
    assert padded["a"].shape == (2, rank + 1) and padded["b"][0].shape == (size - 1, 2) and padded["c"].item() == 3
    assert padded["b"][0].sum().item() == 2 * rank and padded["b"][0].dtype == torch.bool
    assert nested["b"][0].shape == (rank, 2), "the input must stay as it was"
    assert ops.pad_across_processes(wide.half(), dim=1).dtype == torch.half
    assert torch.equal(
        ops.gather(ops.pad_across_processes(wide.t(), dim=0))[:size, 0], torch.tensor([1] + [0] * (size - 1))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning):
        assert ops.pad_across_processes(ragged) is ragged
    with pytest.warns(CannotPadNestedTensorWarning):
        both = ops.pad_across_processes([ragged, torch.ones(rank + 1)])
    assert both[0] is ragged and both[1].shape == (size,), "the others are padded all the same"
    with pytest.raises(TypeError, match="str"):
        ops.pad_across_processes({"a": "text"})


@pytest.mark.parametrize("processes", [2, 3])
def test_pad_across_processes(processes: int) -> None:
    run_world(_pad, processes)


def _copy() -> None:
    state = PartialState()
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).t() if state.process_index == 1 else None
    copied = ops.copy_tensor_to_devices(tensor)
    assert copied.dtype == torch.int16 and torch.equal(copied, torch.arange(6, dtype=torch.int16).view(2, 3).t())
    assert ops.copy_tensor_to_devices(torch.tensor(True) if state.is_last_process else None).item() is True
    shape = ops.gather_tensor_shape(tensor)
    assert shape.shape == (3, 2) and shape.dtype == torch.int16
    with pytest.raises(ValueError, match="No process has a tensor"):
        ops.copy_tensor_to_devices(None)


@pytest.mark.parametrize("processes", [2, 3])
def test_copy_of_a_tensor_only_one_rank_has(processes: int) -> None:
    run_world(_copy, processes)


def _refuse() -> None:
    for operation in (ops.gather, ops.broadcast, ops.reduce):
        with pytest.raises(TypeError, match="str"):
            operation({"a": torch.ones(1), "b": "text"})
    assert current().size == 2
    assert ops.gather(torch.tensor(1)).tolist() == [1, 1]


def test_values_that_are_no_tensors_are_refused() -> None:
    run_world(_refuse, 2)


def test_one_process_gets_its_own_data_back() -> None:
    data = {"a": [torch.tensor(1), "text"], "b": torch.ones(2, 3).t()}
    assert ops.gather(data) is data
    assert ops.gather_object(data) is data
    assert ops.broadcast(data["b"]) is data["b"]
    assert ops.broadcast_data(data) is data
    assert ops.pad_across_processes(data["b"]) is data["b"]
    reduced = ops.reduce(torch.tensor([1, 2]), "mean")
    assert reduced.dtype == torch.int64 and reduced.tolist() == [1, 2]
    items = [1, 2]
    assert ops.broadcast_object_list(items) is items == [1, 2]
    tensor = torch.ones(2)
    assert torch.equal(ops.copy_tensor_to_devices(tensor), tensor)
