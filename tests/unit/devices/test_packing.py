from __future__ import annotations

import pytest
import torch

from accelerate.devices.packing import pack_, packs_of, unpack_

CASES = {
    "one shape": [torch.arange(12.0).view(3, 4) + 100 * i for i in range(20)],
    "one shape, one row": [torch.full((1, 5), i, dtype=torch.bfloat16) for i in range(20)],
    "one shape, flat, bool": [torch.arange(7) % (i + 2) == 0 for i in range(20)],
    "one tensor": [torch.randn(2, 3, dtype=torch.complex64)],
    "shapes with the same rest": [torch.full((i % 3 + 1, 4), i) for i in range(20)],
    "as many elements, other shapes": [torch.arange(6).view((2, 3) if i % 2 else (3, 2)) + i for i in range(20)],
    "no dimensions": [torch.tensor(i) for i in range(20)],
    "nothing": [torch.empty(3, 0) for _ in range(20)],
    "rows of nothing": [torch.empty(0, 3) for _ in range(20)],
    "another order": [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(20)],
    "one in another order": [torch.randn(4, 4) if i != 7 else torch.randn(4, 4).t() for i in range(20)],
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_unpacked_is_what_was_packed(name: str) -> None:
    tensors = CASES[name]
    packed = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
    pack_(packed, tensors)
    assert torch.equal(packed, torch.cat([tensor.flatten() for tensor in tensors]))
    outs = [torch.empty_like(tensor) for tensor in tensors]
    memory = [out.data_ptr() for out in outs]
    unpack_(outs, packed)
    for out, tensor, address in zip(outs, tensors, memory, strict=True):
        assert torch.equal(out, tensor)
        assert out.stride() == tensor.stride() and out.data_ptr() == address  # filled, and not replaced


MIXED = {
    "one kind": [torch.full((3, 5), float(i)) for i in range(40)],
    "no dimensions": [torch.tensor(float(i)) for i in range(40)],
    "two dtypes": [torch.full((i % 4 + 1, 3), i, dtype=torch.int16 if i % 3 else torch.float64) for i in range(90)],
    "bool and NaN": [torch.arange(9) % 2 == 0 for _ in range(20)] + [torch.tensor([torch.nan, -0.0])] * 20,
    "no arithmetic": [torch.arange(8).to(torch.float8_e5m2) for _ in range(20)],
    "complex": [torch.randn(2, 3, dtype=torch.complex64) for _ in range(20)],
}


@pytest.mark.parametrize("name", MIXED)
def test_what_travels_together_arrives_in_tensors_of_their_own(name: str) -> None:
    tensors = MIXED[name]
    packs = packs_of(tensors, 1000)
    assert sorted(place for _, places in packs for place in places) == list(range(len(tensors)))
    for pack, places in packs:
        memory = pack.memory(torch.device("cpu")).copy_(pack.packed())
        found = pack.unpacked(memory)
        memory.zero_()
        for out, tensor in zip(found, (tensors[place] for place in places), strict=True):
            assert out.dtype == tensor.dtype and out.shape == tensor.shape and out.stride() == tensor.stride()
            assert torch.equal(out.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            assert out.untyped_storage().nbytes() == tensor.nbytes and out._base is None
        versions = [out._version for out in found]
        found[0].zero_()
        assert [out._version for out in found[1:]] == versions[1:] and found[0]._version > versions[0]
        assert len({out.data_ptr() for out in found}) == len(found)


def test_only_small_whole_tensors_travel_together_and_only_where_they_are_many() -> None:
    small = [torch.full((i % 2 + 1,), float(i)) for i in range(20)]
    others = [torch.zeros(100), torch.zeros(4, 4).t(), torch.empty(0, 3), *(torch.tensor(i) for i in range(15))]
    packs = packs_of([*others, *small], 64)
    assert [places for _, places in packs] == [list(range(len(others), len(others) + 20))]
    assert packs_of(small[:15], 64) == [] and packs_of([torch.zeros(100)] * 20, 64) == []
    assert packs_of([torch.empty(0, 3)] * 20, 64) == []
