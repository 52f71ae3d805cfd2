"""NCCL between processes without a GPU: a transfer ends at both ends, once both have begun it. No test in here."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import secrets
import socket
from dataclasses import dataclass

from pagefleet_kv.p2p.planes.nccl.communicator import SOURCE_RANK
from pagefleet_kv.p2p.planes.nccl.library import UNIQUE_ID_BYTES, NcclError, NcclFunctions, State


@dataclass(eq=False)
class _End:
    """A communicator."""

    rank: int
    waiting: socket.socket | None
    """On which the source waits for the target."""
    other: socket.socket | None = None
    left: memoryview | None = None
    """Of what is sent or received."""
    is_acknowledged: bool = True


class SocketNccl(NcclFunctions):
    """NCCL of one device."""

    def __init__(self) -> None:
        self.version = 22907
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, socket.socket] = {}
        self._ends: dict[int, _End] = {}

    def unique_id(self) -> bytes:
        name = secrets.token_hex(16).encode()
        waiting = self._waiting[name] = _socket()
        waiting.bind(b"\0" + name)
        waiting.listen()
        return name.ljust(UNIQUE_ID_BYTES, b"\0")

    def begin(self, unique_id: bytes, rank: int, name: str, max_ctas: int) -> int:
        handle, place = next(self._numbers), unique_id.rstrip(b"\0")
        if rank == SOURCE_RANK:
            self._ends[handle] = _End(rank, self._waiting.pop(place))
            return handle
        other = _socket()
        try:
            other.connect(b"\0" + place)
        except OSError as error:
            raise NcclError("the other rank is gone") from error
        self._ends[handle] = _End(rank, None, other)
        return handle

    def state(self, communicator: int) -> State:
        end = self._ends[communicator]
        try:
            with contextlib.suppress(BlockingIOError):
                self._go_on(end)
        except OSError as error:
            raise NcclError("the other rank is gone") from error
        is_ready = end.other is not None and end.left is None and end.is_acknowledged
        return State.READY if is_ready else State.IN_PROGRESS

    def send(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._begin(self._ends[communicator], address, num_bytes)

    def recv(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self._begin(self._ends[communicator], address, num_bytes)

    def abort(self, communicator: int) -> None:
        end = self._ends.pop(communicator)
        for one in (end.waiting, end.other):
            if one is not None:
                one.close()

    @staticmethod
    def _begin(end: _End, address: int, num_bytes: int) -> None:
        assert end.left is None, "something was asked of a communicator before it was ready"
        end.left = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
        end.is_acknowledged = False

    @staticmethod
    def _go_on(end: _End) -> None:
        if end.other is None:
            assert end.waiting is not None
            end.other, _ = end.waiting.accept()
            end.other.setblocking(False)
        while end.left:
            moved = end.other.send(end.left) if end.rank == SOURCE_RANK else end.other.recv_into(end.left)
            if not moved:
                raise ConnectionError
            end.left = end.left[moved:]
        if end.left is not None:
            end.left = None
            if end.rank != SOURCE_RANK:
                end.other.send(b"\1")
                end.is_acknowledged = True
        if not end.is_acknowledged:
            if not end.other.recv(1):
                raise ConnectionError
            end.is_acknowledged = True


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    return made
