"""NCCL whose kernels are among others of a device, which run one after another: see `KernelQueues`."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.nccl.communicator import SOURCE_RANK, TARGET_RANK
from pagefleet_kv.p2p.planes.nccl.library import UNIQUE_ID_BYTES, NcclFunctions, State

from tests.fakes.kernel_queues import Kernel, KernelQueues

_Memory = tuple[int, int]
"""Address and length."""


@dataclass(eq=False)
class _End:
    """A communicator."""

    unique_id: bytes
    rank: int
    num_transfers: int = 0
    launching: tuple[_Memory, int] | None = None
    """What is launched by the next look, and its stream."""
    kernel: Kernel | None = None


@dataclass
class QueuedWorld:
    """Where ranks meet. Where nothing `connects` those who send wait for the other rank's process before their first
    kernel, which has stopped."""

    connects: bool = True

    queues: KernelQueues = field(default_factory=KernelQueues)
    ends: dict[int, _End] = field(default_factory=dict)
    streams: dict[int, tuple[Hashable, Kernel]] = field(default_factory=dict)
    """Of each, its device and the kernel that it was given last."""
    places: dict[Hashable, dict[int, _Memory]] = field(default_factory=dict)
    """Of each transfer, by rank."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def check_is_empty(self) -> None:
        """Nothing is left of what was at work in it."""
        assert not self.ends, "a communicator was left to itself"
        assert not self.queues.num_waiting


class QueuedNccl(NcclFunctions):
    """NCCL of one device of a world."""

    def __init__(self, world: QueuedWorld, device: Hashable) -> None:
        self.version = 22907
        self._world = world
        self._device = device

    def unique_id(self) -> bytes:
        return next(self._world.numbers).to_bytes(8, "little").ljust(UNIQUE_ID_BYTES, b"\x01")

    def begin(self, unique_id: bytes, rank: int, name: str, max_ctas: int) -> int:
        with self._world.lock:
            handle = next(self._world.numbers)
            self._world.ends[handle] = _End(unique_id, rank)
        return handle

    def state(self, communicator: int) -> State:
        with self._world.lock:
            mine = self._world.ends[communicator]
            if sum(end.unique_id == mine.unique_id for end in self._world.ends.values()) < 2:
                return State.IN_PROGRESS
            if mine.launching is not None and mine.rank == SOURCE_RANK and not self._world.connects:
                return State.IN_PROGRESS
            if mine.launching is not None:
                self._launch(mine, *mine.launching)
                mine.launching = None
            return State.READY

    def send(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._transfer(communicator, (address, num_bytes), stream)

    def recv(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._transfer(communicator, (address, num_bytes), stream)

    def abort(self, communicator: int) -> None:
        with self._world.lock:
            kernel = self._world.ends.pop(communicator).kernel
            if kernel is not None:
                self._world.queues.abort(self._device, kernel)

    def _transfer(self, communicator: int, memory: _Memory, stream: int) -> None:
        with self._world.lock:
            mine = self._world.ends[communicator]
            assert mine.launching is None, "something was asked of a communicator before it was ready"
            mine.launching = memory, stream

    def _launch(self, mine: _End, memory: _Memory, stream: int) -> None:
        name = mine.unique_id, mine.num_transfers
        mine.num_transfers += 1
        places = self._world.places.setdefault(name, {})
        places[mine.rank] = memory
        kernel = self._world.queues.kernel(name, 2, lambda: _copy(places[SOURCE_RANK], places[TARGET_RANK]))
        mine.kernel = kernel
        self._world.streams[stream] = self._device, kernel
        self._world.queues.launch(self._device, kernel)


def _copy(source: _Memory, target: _Memory) -> None:
    assert source[1] == target[1], "NCCL would hang: lengths differ"
    ctypes.memmove(target[0], *source)


@dataclass(frozen=True)
class _Stream:
    cuda_stream: int


@dataclass(frozen=True)
class _Mark:
    queues: KernelQueues
    launched: tuple[Hashable, Kernel] | None

    def done(self) -> bool:
        return self.launched is None or self.queues.has_left(*self.launched)

    def wait(self) -> None:
        assert self.done(), "what was aborted has left"


class StreamedCopies:
    """Copies on a CPU, whose streams are those of a world's devices."""

    def __init__(self, copies: DeviceCopies, world: QueuedWorld) -> None:
        self._copies = copies
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def new_stream(self) -> _Stream:
        return _Stream(next(self._world.numbers))

    def mark(self, stream: _Stream) -> _Mark:
        return _Mark(self._world.queues, self._world.streams.get(stream.cuda_stream))
