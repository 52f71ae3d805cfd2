"""What all connections of the tcp plane have in common, and the one that has not yet proved that it was invited."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from selectors import EVENT_READ
from typing import Protocol

from pagefleet_kv.p2p.data_plane import PlaneEvent
from pagefleet_kv.p2p.planes.tcp.hello import HELLO_BYTES
from pagefleet_kv.port import KVPages

QUANTUM_BYTES = 4 << 20
"""Moved for one link before the others have their turn."""
MAX_VIEWS = 64
"""Of one system call."""


class LinkError(Exception):
    """The connection is of no use any more; the message says why."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What all links of one plane share.

    Attributes:
        pages: where blocks are.
        compatibility: of the pages' K/V.
        handshake_s: for both proofs.
        stall_s: a peer that takes or gives nothing of a frame for so long is given up.
        tell: is told what happens.
    """

    pages: PageViews
    compatibility: bytes
    handshake_s: float
    stall_s: float
    tell: Callable[[PlaneEvent], None]


class Connection(Protocol):
    """One socket of the plane's thread."""

    @property
    def socket(self) -> socket.socket:
        """Non-blocking."""
        ...

    @property
    def interest(self) -> int:
        """Events to wait for, as in `selectors`; 0: none for now."""
        ...

    @property
    def deadline(self) -> float:
        """Monotonic time at which it is too late; infinity while nothing is awaited."""
        ...

    def ready(self, mask: int, now: float) -> None:
        """Read or write what goes without waiting; `mask`: what of `interest` has come.

        Raises:
            LinkError: the connection ended.
            OSError: as it comes from the socket.
        """
        ...


class Newcomer:
    """An accepted connection until its hello is whole.

    Args:
        accepted: from the listener.
        deadline: for the hello.
    """

    def __init__(self, accepted: socket.socket, deadline: float) -> None:
        self._socket = accepted
        self._deadline = deadline
        self._hello = b""

    @property
    def socket(self) -> socket.socket:
        """Non-blocking."""
        return self._socket

    @property
    def interest(self) -> int:
        """It is only read."""
        return EVENT_READ

    @property
    def deadline(self) -> float:
        """For the whole hello, however slowly it comes."""
        return self._deadline

    @property
    def hello(self) -> bytes | None:
        """Once it is whole."""
        return self._hello if len(self._hello) == HELLO_BYTES else None

    def ready(self, mask: int, now: float) -> None:
        """Read more of the hello, and nothing after it."""
        try:
            data = self._socket.recv(HELLO_BYTES - len(self._hello))
        except BlockingIOError:
            return
        if not data:
            raise LinkError("it left before its hello")
        self._hello += data


def tune(opened: socket.socket) -> None:
    """Set what every data connection needs."""
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError, OSError):  # not every system has it: then silence lasts until a frame
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


class PageViews:
    """One worker's pages as a few views: neighbours are one view, and pages on a device pass through a buffer.

    Args:
        pages: to read and write.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._host = pages.host

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._pages.bytes_per_block

    def to_send(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return what blocks hold. Waits for a copy where they are on a device."""
        if self._host is not None:
            return self._runs(self._host, blocks)
        copy = memoryview(bytearray(len(blocks) * self.block_bytes))
        self._pages.read(blocks, copy).wait()
        return [copy]

    def to_fill(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return memory to receive blocks in; they are filled once `fill` was called with it."""
        if self._host is not None:
            return self._runs(self._host, blocks)
        return [memoryview(bytearray(len(blocks) * self.block_bytes))]

    def fill(self, received: memoryview | None, blocks: Sequence[int]) -> None:
        """Copy what was received to a device, and wait for it; `received`: the one view of `to_fill`."""
        if self._host is None:
            assert received is not None
            self._pages.write(received, blocks).wait()

    def _runs(self, host: memoryview, blocks: Sequence[int]) -> list[memoryview]:
        size = self.block_bytes
        views = []
        start = 0
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
                views.append(host[blocks[start] * size : (blocks[at - 1] + 1) * size])
                start = at
        return views
