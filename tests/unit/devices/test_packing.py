from __future__ import annotations

import pytest
import torch

from accelerate.devices.packing import pack_, unpack_

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
