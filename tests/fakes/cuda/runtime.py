"""`torch.cuda` of the make-believe device: streams, events and graphs, and the questions that it is asked."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fakes.cuda.streams import FakeEvent, FakeStream
from tests.fakes.cuda.tensors import DeviceMemory
from tests.fakes.recorded_graphs import Operation

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META, _NUM_DEVICE_TYPES = 1, 14, 16
"""Numbers of c10's device types."""


@contextmanager
def device_guard() -> Iterator[None]:
    """Let torch's C++ switch to a CUDA device that is not there: a CPU build has no guard for one.

    That of meta tensors, which does nothing, stands in for it. Raises OSError or ValueError where torch's library has
    no such table.
    """
    suffix = "dylib" if sys.platform == "darwin" else "so"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libc10.{suffix}"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, _GUARDS)
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@dataclass(frozen=True)
class GpuKind:
    """What the device says of itself."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    num_processors: int = 132
    memory: int = 2 << 30


@dataclass(frozen=True)
class Launched:
    """One entry of a graph."""

    name: str
    """Of the kernel, or of the operation."""
    run: Any
    """Does it again."""


class Capture:
    """What is launched while a graph is captured; implements `tensors.Recorder`."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []

    def add(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """See Recorder."""
        name = getattr(getattr(func, "overloadpacket", None), "_qualified_op_name", getattr(func, "__name__", ""))
        self.launched.append(Launched(name, Operation(func, args, kwargs, results).repeat))


class FakeGraph:
    """Records what is launched, and does it again."""

    memory: DeviceMemory
    graphs: list[list[Launched]]

    def __init__(self) -> None:
        self._capture = Capture()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """See torch.cuda.CUDAGraph."""
        assert self.memory.capture is None, "captures do not nest"
        self.memory.capture = self._capture

    def capture_end(self) -> None:
        """See torch.cuda.CUDAGraph."""
        self.memory.capture = None
        self.graphs.append(self._capture.launched)

    def replay(self) -> None:
        """See torch.cuda.CUDAGraph."""
        for launched in self._capture.launched:
            launched.run()


def cuda_stand_ins(memory: DeviceMemory, kind: GpuKind, graphs: list[list[Launched]]) -> ExitStack:
    """Patch `torch.cuda` for as long as the stack is open; `graphs` gets what each captured graph holds."""
    properties = SimpleNamespace(
        name=kind.name,
        total_memory=kind.memory,
        major=kind.capability[0],
        minor=kind.capability[1],
        multi_processor_count=kind.num_processors,
    )
    streams = memory.streams
    # classes of this device: torch's modules name them in types
    own = {"streams": streams, "host_waits": staticmethod(memory.wait)}
    stream = type("Stream", (FakeStream,), own)

    def synchronize(device: Any = None) -> None:
        streams.end()
        memory.wait("cuda.synchronize")

    return _patched(
        torch.cuda,
        _lazy_init=lambda: None,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=synchronize,
        empty_cache=lambda: None,
        get_device_capability=lambda device=None: kind.capability,
        get_device_name=lambda device=None: kind.name,
        get_device_properties=lambda device=None: properties,
        mem_get_info=lambda device=None: (kind.memory * 3 // 4, kind.memory),
        memory_allocated=lambda device=None: 1 << 20,
        max_memory_allocated=lambda device=None: 256 << 20,
        reset_peak_memory_stats=lambda device=None: None,
        graph_pool_handle=lambda: (0, 1),
        Stream=stream,
        Event=type("Event", (FakeEvent,), own),
        CUDAGraph=type("CUDAGraph", (FakeGraph,), {"memory": memory, "graphs": graphs}),
        current_stream=lambda device=None: stream(number=streams.current),
        stream=lambda given: streams.on(given.number),
        device=_nothing,
    )


def tensor_stand_ins(memory: DeviceMemory) -> ExitStack:
    """Patch what torch asks its CUDA library without passing the dispatcher."""

    class HostGenerator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    def pinned(tensor: Tensor, device: Any = None) -> Tensor:
        return memory.pin(tensor.clone())

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        return memory.is_pinned(tensor)

    stack = _patched(torch.Tensor, pin_memory=pinned, is_pinned=is_pinned)
    stack.enter_context(_patched(torch, Generator=HostGenerator))
    stack.enter_context(_patched(torch.version, cuda="13.0"))
    return stack


def _nothing(_: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _patched(target: Any, **values: Any) -> ExitStack:
    stack = ExitStack()
    for name, value in values.items():
        stack.enter_context(mock.patch.object(target, name, value))
    return stack
