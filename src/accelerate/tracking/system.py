"""How busy the machine is: samples of the processor, of memory, and of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

GIB = 2**30


class Gauges:
    """The samples of one process. first_here: also those of its machine, which one process of it takes.

    memory: gives free and total bytes of the device; None where it has no memory of its own.
    device_id: what NVIDIA's driver knows the device by.
    """

    def __init__(self, first_here: bool, memory: Callable[[], tuple[int, int]] | None, device_id: str | None) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        self._first_here = first_here
        self._memory = memory
        self._gpu = None if device_id is None else gpu_use(device_id)
        with suppress(psutil.Error, OSError):
            self._process.cpu_percent()  # use since the last call: the first one only begins
            psutil.cpu_percent()

    def __call__(self) -> dict[str, float]:
        """What can be found out now, by name."""
        found: dict[str, float] = {}
        with suppress(self._psutil.Error, OSError):
            found["process CPU, %"] = self._process.cpu_percent()
            found["process memory, GiB"] = self._process.memory_info().rss / GIB
            if self._first_here:
                found["machine CPU, %"] = self._psutil.cpu_percent()
                found["machine memory, %"] = self._psutil.virtual_memory().percent
        if self._memory is not None:
            with suppress(RuntimeError, AttributeError):
                free, total = self._memory()
                found["GPU memory, GiB"] = (total - free) / GIB
        if self._gpu is not None and (use := self._gpu()) is not None:
            found["GPU use, %"] = use
        return found


class _Use(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def gpu_use(device_id: str) -> Callable[[], float | None] | None:
    """Return a function that reads the utilization of the GPU in percent, or None without NVIDIA's driver."""
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(device_id.encode(), ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def read() -> float | None:
        use = _Use()
        return None if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) else float(use.gpu)

    return read
