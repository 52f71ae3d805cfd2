"""NCCL and CUDA IPC without a GPU: ranks in one process that meet, copy host memory, and fail when a test says so."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pagefleet_kv.cuda_memory import HANDLE_BYTES, CudaError, CudaSharedMemory, OpenedMemory
from pagefleet_kv.p2p.planes.nccl.library import UNIQUE_ID_BYTES, NcclError, NcclFunctions, State
from torch import Tensor


@dataclass(eq=False)
class _Rank:
    unique_id: bytes
    rank: int
    pending: tuple[int, int] | None = None
    """Address and length of the transfer that is being launched."""
    error: str | None = None


@dataclass
class NcclWorld:
    """Where ranks meet, and what goes wrong there.

    `nobody_meets`: communicators are never ready. `nothing_moves`: transfers never end. `damage`: is given the address
    and length of what a receiver got.
    """

    nobody_meets: bool = False
    nothing_moves: bool = False
    damage: Callable[[int, int], None] | None = None
    ranks: dict[int, _Rank] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    handles: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    num_begun: int = 0

    def peer_of(self, mine: _Rank) -> _Rank | None:
        """The other rank, if it came."""
        ranks = [r for r in self.ranks.values() if r.unique_id == mine.unique_id and r is not mine]
        return ranks[0] if ranks else None

    def fail_all(self, why: str) -> None:
        """Every communicator has failed."""
        with self.lock:
            for rank in self.ranks.values():
                rank.error = why

    def meet(self, mine: _Rank) -> None:
        """Copy, if both ranks are there."""
        other = self.peer_of(mine)
        if self.nothing_moves or other is None or mine.pending is None or other.pending is None:
            return
        sender, receiver = (mine, other) if mine.rank == 0 else (other, mine)
        assert sender.pending is not None
        assert receiver.pending is not None
        assert sender.pending[1] == receiver.pending[1], "NCCL would hang: lengths differ"
        ctypes.memmove(receiver.pending[0], sender.pending[0], sender.pending[1])
        if self.damage is not None:
            self.damage(*receiver.pending)
        sender.pending = receiver.pending = None


class FakeNccl(NcclFunctions):
    """NCCL of one engine of a world."""

    def __init__(self, world: NcclWorld, version: int = 22907) -> None:
        self.version = version
        self.world = world
        self.callers: set[int] = set()
        self.refuses: str | None = None
        """Why no communicator can be made."""

    def unique_id(self) -> bytes:
        self.callers.add(threading.get_ident())
        return next(self.world.handles).to_bytes(8, "little").ljust(UNIQUE_ID_BYTES, b"\x01")

    def begin(self, unique_id: bytes, rank: int, name: str, max_ctas: int) -> int:
        self.callers.add(threading.get_ident())
        assert name
        assert 1 <= max_ctas <= 4
        if self.refuses is not None:
            raise NcclError(self.refuses)
        with self.world.lock:
            handle = next(self.world.handles)
            self.world.ranks[handle] = _Rank(unique_id, rank)
            self.world.num_begun += 1
        return handle

    def state(self, communicator: int) -> State:
        self.callers.add(threading.get_ident())
        with self.world.lock:
            mine = self.world.ranks[communicator]
            if mine.error is not None:
                raise NcclError(mine.error)
            if self.world.nobody_meets or self.world.peer_of(mine) is None or mine.pending is not None:
                return State.IN_PROGRESS
            return State.READY

    def send(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._transfer(communicator, address, num_bytes, 0)

    def recv(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._transfer(communicator, address, num_bytes, 1)

    def abort(self, communicator: int) -> None:
        self.callers.add(threading.get_ident())
        with self.world.lock:
            del self.world.ranks[communicator]

    def _transfer(self, communicator: int, address: int, num_bytes: int, rank: int) -> None:
        self.callers.add(threading.get_ident())
        with self.world.lock:
            mine = self.world.ranks[communicator]
            assert mine.rank == rank
            assert mine.pending is None, "something was asked of a communicator before it was ready"
            mine.pending = (address, num_bytes)
            self.world.meet(mine)


_HANDLE = struct.Struct(f"<QQ{HANDLE_BYTES - 16}x")


class FakeSharedMemory(CudaSharedMemory):
    """Host memory of this process; `damage` as in `NcclWorld`."""

    def __init__(self, damage: Callable[[int, int], None] | None = None) -> None:
        self.damage = damage
        self.refuses = False
        self.opened = 0
        self.freed = False

    def export(self, num_bytes: int) -> tuple[Tensor, bytes]:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return memory, _HANDLE.pack(memory.data_ptr(), num_bytes)

    def free(self, memory: Tensor) -> None:
        self.freed = True

    def open(self, handle: bytes) -> OpenedMemory:
        if self.refuses:
            raise CudaError("cudaIpcOpenMemHandle: invalid device context")
        self.opened += 1
        return OpenedMemory(*_HANDLE.unpack(handle))

    def close(self, memory: OpenedMemory) -> None:
        self.opened -= 1

    def copy(self, address: int, into: Tensor, stream: int) -> None:
        ctypes.memmove(into.data_ptr(), address, len(into))
        if self.damage is not None:
            self.damage(into.data_ptr(), len(into))
