"""A GPU's context before torch asks for it: the driver takes some tenths of a second to make one, and needs no lock of
Python's, so it may do that while Python imports torch."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Any

LIBRARY = "libcuda.so.1"


def open_ahead(device: str, library: str = LIBRARY) -> threading.Thread | None:
    """Begin to make the first GPU's context, which torch then finds; None where the device is the CPU.

    For a process that computes on that GPU. What fails is told by whoever needs the GPU.
    """
    if device == "cpu":
        return None
    thread = threading.Thread(target=_open, args=(library,), name="cuda context", daemon=True)
    thread.start()
    return thread


def _open(library: str) -> None:
    with suppress(OSError, AttributeError):  # no driver, or none that is known
        driver: Any = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
