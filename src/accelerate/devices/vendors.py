"""Hardware that torch reaches through a vendor's module of the usual shape.

None of these is part of our tests: each row is what the vendor's documentation says, and everything that is
asked of the device goes through `torch.<name>` as it does for CUDA.
"""

from __future__ import annotations

from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device

VENDORS: tuple[Device, ...] = tuple(
    Device(name, backend=backend, label=label, plugin=plugin, tested=False)
    for name, backend, label, plugin in (
        ("mlu", "cncl", DistributedType.MULTI_MLU, "torch_mlu"),
        ("sdaa", "tccl", DistributedType.MULTI_SDAA, "torch_sdaa"),
        ("musa", "mccl", DistributedType.MULTI_MUSA, "torch_musa"),
        ("npu", "hccl", DistributedType.MULTI_NPU, "torch_npu"),
        ("hpu", "hccl", DistributedType.MULTI_HPU, "habana_frameworks.torch"),
        ("xpu", "xccl", DistributedType.MULTI_XPU, None),
        ("neuron", "neuron", DistributedType.MULTI_NEURON, "torch_neuronx"),
    )
)
