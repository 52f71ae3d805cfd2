"""The device's graphs behind an interface, so that what is captured and replayed can be tested without a GPU.

A capture may be ended and another begun in the middle of a computation: tensors that are alive at that moment keep
their memory, and the next graph goes on with them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch


class DeviceGraph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Launch it again on the current stream: same addresses, whatever they hold now."""
        ...


class DeviceGraphs(Protocol):
    """Makes graphs that share one memory pool.

    Memory that a capture frees serves later captures, so what a graph leaves in the pool is only good until a graph
    that is not its continuation is replayed. Results that must stay are copied into tensors made outside of captures.
    """

    def session(self) -> AbstractContextManager[None]:
        """Within it captures can be made. Warm up here as well: libraries keep work space per stream."""
        ...

    def begin(self) -> None:
        """From here on work is recorded and not done."""
        ...

    def end(self) -> DeviceGraph:
        """The work since `begin`."""
        ...

    def abandon(self) -> None:
        """Forget the capture that is open, if one is, after an error."""
        ...

    def memory_used(self) -> int:
        """Bytes of the device that were taken since this object was made, those of the driver included."""
        ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph`, captured on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._open: torch.cuda.CUDAGraph | None = None
        self._made = WeakSet[torch.cuda.CUDAGraph]()
        self._free_before = self._free_bytes()

    @contextmanager
    def session(self) -> Iterator[None]:
        """See DeviceGraphs. No garbage is collected: a tensor that ends in the wrong moment breaks a capture.

        Torch 2.11 refuses a memory pool whose graphs have all ended: then there is a new one.
        """
        if not self._made:
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if collects:
                gc.enable()
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """See DeviceGraphs. Other threads may go on using CUDA."""
        assert self._open is None, "captures do not nest"
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self) -> torch.cuda.CUDAGraph:
        """See DeviceGraphs."""
        graph, self._open = self._open, None
        assert graph is not None, "no capture is open"
        graph.capture_end()
        self._made.add(graph)
        return graph

    def abandon(self) -> None:
        """See DeviceGraphs. Ending a capture that failed fails again; the stream is usable afterwards."""
        graph, self._open = self._open, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()

    def memory_used(self) -> int:
        """See DeviceGraphs."""
        return self._free_before - self._free_bytes()

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        info: Any = torch.cuda.mem_get_info(self._device)
        return int(info[0])
