"""What the driver says of this machine's GPUs, without torch: their names, the first one's size, the energy that
they draw."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LIBRARY = "libnvidia-ml.so.1"
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


class EnergyMeter(Protocol):
    """Counts what a device draws."""

    def joules(self) -> float | None:
        """Return the energy drawn since some moment; None where the device does not tell."""
        ...


class GpuEnergy:
    """The counters of some GPUs, from now on."""

    def __init__(self, driver: Any, handles: Sequence[ctypes.c_void_p]) -> None:
        self._driver, self._handles = driver, handles
        self._start = self._millijoules() or 0

    def joules(self) -> float | None:
        """See EnergyMeter."""
        now = self._millijoules()
        return None if now is None else (now - self._start) / 1000

    def _millijoules(self) -> int | None:
        total = 0
        for handle in self._handles:
            energy = ctypes.c_ulonglong()
            if self._driver.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
                return None
            total += energy.value
        return total


def gpu_energy(count: int = 1, library: str = LIBRARY) -> GpuEnergy | None:
    """Return the meter of the first `count` visible GPUs; None without one, or where one has none."""
    driver = _driver(library)
    if driver is None:
        return None
    handles = [_handle(driver, name) for name in _visible(driver)[:count]]
    meter = GpuEnergy(driver, [handle for handle in handles if handle is not None])
    return None if not handles or None in handles or meter.joules() is None else meter


def first_gpu(library: str = LIBRARY) -> GpuSize | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves visible; None without one, or where the driver does not say."""
    driver = _driver(library)
    name = next(iter(_visible(driver)), None) if driver is not None else None
    handle = _handle(driver, name) if name is not None else None
    if driver is None or handle is None:
        return None
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    failed = driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    failed = failed or driver.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return None if failed else GpuSize(memory.total, (major.value, minor.value))


def visible_gpus(library: str = LIBRARY) -> list[str]:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES leaves visible, as it takes them."""
    driver = _driver(library)
    return [] if driver is None else _visible(driver)


def _driver(library: str) -> Any:
    """Return NVML's functions, of which 0 is success; None where there is no driver."""
    try:
        driver: Any = ctypes.CDLL(library)
    except OSError:
        return None
    return None if driver.nvmlInit_v2() else driver


def _visible(driver: Any) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        count = ctypes.c_uint()
        failed = driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [] if failed else [str(index) for index in range(count.value)]
    names = [name.strip() for name in named.split(",")]
    hidden = [place for place, name in enumerate(names) if name in ("", "-1")]
    return names[: hidden[0]] if hidden else names  # CUDA ends its list at the first name of none


def _handle(driver: Any, name: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if name.isdecimal():
        failed = driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        failed = driver.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return None if failed else handle
