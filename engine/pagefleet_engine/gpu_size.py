"""How many tokens a step should have on this machine's GPU. The driver is asked: settings are read without torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

LARGE_STEP = 8192
_LARGE_MEMORY = 70 * 10**9
_LARGE_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class GpuSize:
    """What one GPU has."""

    memory: int
    """Bytes."""
    capability: tuple[int, int]

    def step_tokens(self, default: int) -> int:
        """LARGE_STEP from Hopper on with 70 GB or more, as peers take; `default` else."""
        is_large = self.memory >= _LARGE_MEMORY and self.capability >= _LARGE_CAPABILITY
        return max(default, LARGE_STEP) if is_large else default


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def first_gpu(library: str = "libnvidia-ml.so.1") -> GpuSize | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves visible; None without one, or where the driver does not say."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return None
    return _ask(driver, wanted)


def _ask(driver: Any, wanted: str) -> GpuSize | None:
    """`wanted`: a number or an identifier, as in CUDA_VISIBLE_DEVICES; `driver`: NVML's functions, 0 is success."""
    if driver.nvmlInit_v2() != 0:
        return None
    handle, memory, major, minor = ctypes.c_void_p(), _Memory(), ctypes.c_int(), ctypes.c_int()
    if wanted.isdecimal():
        failed = driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(wanted)), ctypes.byref(handle))
    else:
        failed = driver.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(handle))
    failed = failed or driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    failed = failed or driver.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return None if failed else GpuSize(memory.total, (major.value, minor.value))
