"""What this machine has, found without torch: importing it would cost seconds before anything starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate.available import is_torchao_available, lacks_fp8_package


@dataclass(frozen=True)
class Accelerators:
    """The devices of this machine that torch would use: of which kind, how many, and how that is known."""

    kind: str
    count: int
    reason: str

    @property
    def visible_variable(self) -> str:
        """The variable that chooses among them."""
        return _VISIBLE.get(self.kind, "CUDA_VISIBLE_DEVICES")


_VISIBLE = {
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}
# The package that brings the device to torch.
_VENDOR_PACKAGES = {
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "sdaa": "torch_sdaa",
    "musa": "torch_musa",
    "hpu": "habana_frameworks",
    "neuron": "torch_neuronx",
}


def accelerators(environ: Mapping[str, str] | None = None) -> Accelerators:
    """The devices that torch would find."""
    environ = os.environ if environ is None else environ
    for kind, package in _VENDOR_PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            return _ask_torch(kind, package)
    built_for = _torch_built_for()
    if "cuda" in built_for:
        return _chosen(_nvidia(), environ, "CUDA_VISIBLE_DEVICES")
    if "hip" in built_for:
        return _chosen(_amd(), environ, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    if "xpu" in built_for:
        return _ask_torch("xpu", None)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return Accelerators("mps", 1, "this is a Mac with an Apple GPU")
    return Accelerators("cpu", 0, "the installed torch is built for the CPU")


def best_precision(devices: Accelerators) -> tuple[str, str]:
    """The number format that suits the devices, and why."""
    if devices.kind != "cuda" or "cuda" not in _torch_built_for():
        return "no", "nothing is known that would compute faster in half precision"
    found = _capability()
    if found is None:
        return "no", "the NVIDIA driver does not say what the GPU can do"
    capability = f"the GPU has compute capability {found[0]}.{found[1]}"
    return ("bf16", f"{capability}: bf16 is fast") if found[0] >= 8 else ("fp16", f"{capability}: no fast bf16")


def fp8(devices: Accelerators) -> tuple[str, str]:
    """Whether matrix products in fp8 can be had here, and why."""
    if (missing := lacks_fp8_package()) is not None:
        return "no", missing.rstrip(".")
    if devices.kind == "cpu":
        return ("emulated", "by torchao, on the CPU") if is_torchao_available() else ("no", "it needs a GPU")
    found = _capability() if devices.kind == "cuda" and "cuda" in _torch_built_for() else None
    if found is None:
        return "not known", f"the driver does not say what this {devices.kind} device can do"
    return "yes" if found >= (8, 9) else "no", f"compute capability {found[0]}.{found[1]}, but it needs 8.9 or more"


def _capability() -> tuple[int, int] | None:
    """What the first NVIDIA GPU can do, as its driver says."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    library.nvmlInit_v2()
    failed = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) or (
        library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    )
    library.nvmlShutdown()
    return None if failed else (major.value, minor.value)


def cores() -> int:
    """The processors this process may use, without counting threads of one core twice."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in allowed})
    except OSError:
        return len(allowed)


def _torch_built_for() -> dict[str, str]:
    """The platforms that the installed torch was built for, as its own version file says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *'([^']+)'", text, re.MULTILINE))


def _nvidia() -> Accelerators:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Accelerators("cpu", 0, "there is no NVIDIA driver")
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return Accelerators("cpu", 0, "the NVIDIA driver does not answer")
    library.nvmlShutdown()
    return Accelerators("cuda", count.value, f"the NVIDIA driver knows {count.value}")


def _amd() -> Accelerators:
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    count = sum(node.read_text().strip() not in ("", "0") for node in nodes)
    return Accelerators("cuda" if count else "cpu", count, f"the AMD driver knows {count}")


def _chosen(found: Accelerators, environ: Mapping[str, str], *variables: str) -> Accelerators:
    """Those of the devices that the environment lets through."""
    for variable in variables:
        if found.count and variable in environ:
            ids = [part for part in environ[variable].split(",") if part.strip()]
            count = 0 if "-1" in ids else min(len(ids), found.count)
            return Accelerators("cuda" if count else "cpu", count, f"{variable} is {environ[variable]!r}")
    return found


def _ask_torch(kind: str, package: str | None) -> Accelerators:
    # Devices that only torch can count: here it has to be imported after all.
    import torch

    if package is not None:
        importlib.import_module(package)
    count = int(getattr(torch, kind).device_count())
    return Accelerators(kind if count else "cpu", count, f"torch.{kind} finds {count}")
