"""The binding of CUDA's runtime against a library in C that checks what it is given."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_kv.cuda_memory import CudaError, CudaSharedMemory, OpenedMemory

COMPILER = shutil.which("cc")
HANDLE = bytes(range(64))
LONG = 5 << 32
INVALID_CONTEXT = 201
STUB_BYTES = 4096


class Runtime:
    """The compiled library, bound, and what it noted."""

    def __init__(self, path: Path) -> None:
        self.memory = CudaSharedMemory(str(path), driver=str(path))
        self._library = ctypes.CDLL(str(path))

    def set(self, name: str, value: int) -> None:
        """Let it answer so."""
        ctypes.c_int.in_dll(self._library, f"stub_{name}").value = value

    def noted(self, name: str) -> int:
        """What is left."""
        return ctypes.c_int.in_dll(self._library, f"stub_{name}").value

    @property
    def complaint(self) -> str:
        """What was wrong first."""
        return (ctypes.c_char * 64).in_dll(self._library, "stub_complaint").value.decode()


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    target, source = tmp_path / "libcudart_stub.so", Path(__file__).with_name("cudart_stub.c")
    subprocess.run([COMPILER, "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, source], check=True)
    return Runtime(target)


def test_memory_of_another_process_is_opened_copied_and_closed(runtime: Runtime) -> None:
    into = torch.zeros(3, dtype=torch.uint8)
    opened = runtime.memory.open(HANDLE)
    assert opened.num_bytes == STUB_BYTES
    runtime.memory.copy(opened.address + 1024, into, 0x600000002000)
    assert into.tolist() == [42, 0, 0]
    assert runtime.noted("opened") == 1
    runtime.memory.close(opened)
    assert runtime.noted("opened") == 0
    assert runtime.complaint == ""


def test_memory_that_begins_within_an_allocation_ends_with_it(runtime: Runtime) -> None:
    runtime.set("offset", 96)
    opened = runtime.memory.open(HANDLE)
    assert opened.num_bytes == STUB_BYTES - 96
    runtime.memory.close(opened)
    assert runtime.complaint == ""


def test_memory_whose_size_is_not_known_is_closed_again(runtime: Runtime) -> None:
    runtime.set("range_result", INVALID_CONTEXT)
    with pytest.raises(CudaError, match="cuMemGetAddressRange: error 201"):
        runtime.memory.open(HANDLE)
    assert runtime.noted("opened") == 0
    assert runtime.complaint == ""


@pytest.mark.parametrize("driver", ["libc.so.6", "nowhere.so"], ids=["another", "none"])
def test_a_driver_that_cannot_be_asked_is_refused(runtime: Runtime, driver: str, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="CUDA cannot be loaded"):
        CudaSharedMemory(str(tmp_path / "libcudart_stub.so"), driver)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda memory: memory.open(HANDLE), "cudaIpcOpenMemHandle"),
        (lambda memory: memory.close(OpenedMemory(0, 0)), "cudaIpcCloseMemHandle"),
        (lambda memory: memory.copy(0, torch.zeros(3, dtype=torch.uint8), 0), "cudaMemcpyAsync"),
    ],
    ids=["open", "close", "copy"],
)
def test_an_error_is_told_and_not_left_for_the_next_kernel_to_find(
    runtime: Runtime, call: Callable[[CudaSharedMemory], object], name: str
) -> None:
    runtime.set("result", INVALID_CONTEXT)
    with pytest.raises(CudaError, match=f"{name}: invalid device context"):
        call(runtime.memory)
    assert runtime.noted("last_error") == 0


def test_memory_that_cannot_be_shared_is_given_back(runtime: Runtime) -> None:
    runtime.set("handle_result", INVALID_CONTEXT)
    with pytest.raises(CudaError, match="cudaIpcGetMemHandle: invalid device context"):
        runtime.memory.export(LONG)
    assert runtime.noted("allocated") == 0
    assert runtime.noted("last_error") == 0
    assert runtime.complaint == ""
