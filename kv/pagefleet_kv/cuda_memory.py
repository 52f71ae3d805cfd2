"""Memory of GPUs that processes of one host share by CUDA's handles."""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from pagefleet_kv.native import bind, find_library

HANDLE_BYTES = 64
DRIVER = "libcuda.so.1"
"""It comes with the kernel's module, so the system's loader finds it; the runtime has loaded it already."""
_LAZY_PEER_ACCESS = 1
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the addresses tell."""


class CudaError(Exception):
    """CUDA cannot be used, or refuses; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """Another process's memory, which can be read here."""

    address: int
    num_bytes: int
    """That can be read from there on, as the driver knows it."""


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which is passed by value."""

    _fields_: ClassVar = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaSharedMemory:
    """Memory of the calling thread's device that processes on one host share by handles. Errors raise `CudaError`.

    It is taken from CUDA itself, as a handle opens whole allocations and torch's hold other tensors too. What crosses
    the processes is CUDA's handle of 64 bytes, nothing that is executed when read; how large the memory is that it
    opens, the driver here tells, not the other process.

    Args:
        path: of CUDA's runtime library, the one that torch uses.
        driver: path or name of CUDA's driver library.

    Raises:
        CudaError: one of them cannot be loaded.
    """

    def __init__(self, path: str, driver: str = DRIVER) -> None:
        try:
            self._bind(ctypes.CDLL(path))
            self._bind_driver(ctypes.CDLL(driver))
        except (OSError, AttributeError) as error:
            raise CudaError(f"CUDA cannot be loaded: {error}") from error

    def export(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return new memory, uint8 [num_bytes], and a handle of it; it lives until `free`."""
        address, handle = ctypes.c_void_p(), _Handle()
        self._check(self._malloc(ctypes.byref(address), num_bytes), "cudaMalloc")
        assert address.value is not None
        try:
            self._check(self._get_handle(ctypes.byref(handle), address), "cudaIpcGetMemHandle")
        except CudaError:
            self._free(address)
            raise
        memory = torch.as_tensor(_Array(address.value, num_bytes), device="cuda")
        memory.zero_()
        return memory, bytes(handle)

    def free(self, memory: Tensor) -> None:
        """Give exported memory back. Who has it open reads what was there, or nothing sensible."""
        self._check(self._free(memory.data_ptr()), "cudaFree")

    def open(self, handle: bytes) -> OpenedMemory:
        """Return where another process's memory lies here, until `close`."""
        address = ctypes.c_void_p()
        opened = self._open(ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        self._check(opened, "cudaIpcOpenMemHandle")
        assert address.value is not None
        try:
            return OpenedMemory(address.value, self._num_bytes_from(address.value))
        except CudaError:
            self._close(address)
            raise

    def close(self, memory: OpenedMemory) -> None:
        """Read it no more."""
        self._check(self._close(memory.address), "cudaIpcCloseMemHandle")

    def copy(self, address: int, into: Tensor, stream: int) -> None:
        """Queue a copy from an address to memory of this process."""
        self._check(self._copy(into.data_ptr(), address, len(into), _ANY_DIRECTION, stream), "cudaMemcpyAsync")

    def _bind(self, runtime: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._malloc = bind(runtime, "cudaMalloc", [ctypes.POINTER(pointer), size])
        self._free = bind(runtime, "cudaFree", [pointer])
        self._get_handle = bind(runtime, "cudaIpcGetMemHandle", [ctypes.POINTER(_Handle), pointer])
        self._open = bind(runtime, "cudaIpcOpenMemHandle", [ctypes.POINTER(pointer), _Handle, ctypes.c_uint])
        self._close = bind(runtime, "cudaIpcCloseMemHandle", [pointer])
        self._copy = bind(runtime, "cudaMemcpyAsync", [pointer, pointer, size, number, pointer])
        self._error_string = bind(runtime, "cudaGetErrorString", [number], ctypes.c_char_p)
        self._forget_error = bind(runtime, "cudaGetLastError", [])

    def _bind_driver(self, driver: ctypes.CDLL) -> None:
        address, size = ctypes.c_uint64, ctypes.c_size_t
        # The name without a number is of the interface that had addresses of 32 bits.
        self._address_range = bind(
            driver, "cuMemGetAddressRange_v2", [ctypes.POINTER(address), ctypes.POINTER(size), address]
        )

    def _num_bytes_from(self, address: int) -> int:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        result = self._address_range(ctypes.byref(base), ctypes.byref(size), address)
        if result:
            raise CudaError(f"cuMemGetAddressRange: error {result}")
        return base.value + size.value - address

    def _check(self, result: int, what: str) -> None:
        if result:
            self._forget_error()  # or torch takes it for an error of the thread's next kernel
            raise CudaError(f"{what}: {(self._error_string(result) or b'').decode(errors='replace')}")


class _Array:
    """Memory at an address, in the form in which torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def find_cudart(cuda_version: str | None) -> str:
    """Return where the runtime is that torch was built for, e.g. `13.0`, or its name for the system's loader."""
    major = (cuda_version or "").partition(".")[0]
    return find_library(["nvidia.cuda_runtime", f"nvidia.cu{major}"], f"libcudart.so.{major}")


def host_identity() -> str:
    """Return what is equal for two processes that can open each other's memory handles, as far as the kernel tells.

    That is one boot of one kernel and the same namespaces of processes and of shared memory: two containers of one host
    have their own unless they were given the host's. Empty where the kernel does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "pid")]
    except OSError:
        return ""
    return hashlib.sha256(" ".join([boot, *names]).encode()).hexdigest()[:32]
