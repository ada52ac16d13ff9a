"""What a machine has, found without torch."""

from __future__ import annotations

import os

import torch

from accelerate.launch import machine
from accelerate.launch.machine import Accelerators, accelerators, best_precision, cores


def test_agrees_with_torch() -> None:
    assert accelerators(os.environ).count == torch.cuda.device_count()
    assert accelerators(os.environ).reason


def test_the_build_of_torch_is_read_from_its_version_file() -> None:
    built_for = machine._torch_built_for()
    assert built_for.get("cuda") == torch.version.cuda
    assert built_for.get("hip") == torch.version.hip


def test_hidden_devices_do_not_count() -> None:
    found = Accelerators("cuda", 4, "the driver knows 4")
    for value, count in (("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4), ("GPU-1234", 1)):
        seen = machine._chosen(found, {"CUDA_VISIBLE_DEVICES": value}, "CUDA_VISIBLE_DEVICES")
        assert seen.count == count, value
        assert value in seen.reason
    assert machine._chosen(found, {}, "CUDA_VISIBLE_DEVICES") is found


def test_each_vendor_has_its_variable() -> None:
    assert Accelerators("cuda", 1, "").visible_variable == "CUDA_VISIBLE_DEVICES"
    assert Accelerators("xpu", 1, "").visible_variable == "ZE_AFFINITY_MASK"
    assert Accelerators("npu", 1, "").visible_variable == "ASCEND_RT_VISIBLE_DEVICES"


def test_cores_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_no_half_precision_without_a_gpu() -> None:
    assert best_precision(Accelerators("cpu", 0, ""))[0] == "no"
