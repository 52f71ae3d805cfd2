"""What both ends of the tcp plane's links use, and the connection that has not yet proved that it was invited."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from pagefleet_kv.p2p.planes.shell import LinkBroken, LinkSettings
from pagefleet_kv.p2p.planes.tcp.hello import HELLO_BYTES
from pagefleet_kv.port import KVPages

QUANTUM_BYTES = 4 << 20
"""Moved for one link before the others have their turn."""
MAX_VIEWS = 64
"""Of one system call."""


class Newcomer:
    """An accepted connection until its hello is whole."""

    def __init__(self, accepted: socket.socket, deadline: float) -> None:
        self.socket = accepted
        """Non-blocking."""
        self.deadline = deadline
        """For the whole hello, however slowly it comes."""
        self._hello = b""

    def read(self) -> bytes | None:
        """Read more of the hello, and nothing after it; return it once it is whole.

        Raises:
            LinkBroken: who knocked has left.
            OSError: as it comes from the socket.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(HELLO_BYTES - len(self._hello))
            if not data:
                raise LinkBroken("it left before its hello")
            self._hello += data
        return self._hello if len(self._hello) == HELLO_BYTES else None


def tune(opened: socket.socket) -> None:
    """Set what every data connection needs."""
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError, OSError):  # not every system has it: then silence lasts until a frame
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


TcpSettings = LinkSettings["PageViews"]


class PageViews:
    """One worker's pages as a few views: neighbours are one view, and pages on a device pass through a buffer."""

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._host = pages.host

    @property
    def block_bytes(self) -> int:
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

    def blank(self, blocks: Sequence[int]) -> None:
        """Zero what `to_fill` gave and was not filled rightly: a CPU's attention reads whole pages, so each number in
        them must be one, whoever has the blocks next."""
        if self._host is not None:
            for view in self._runs(self._host, blocks):
                view[:] = bytes(len(view))

    def _runs(self, host: memoryview, blocks: Sequence[int]) -> list[memoryview]:
        size = self.block_bytes
        views = []
        start = 0
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
                views.append(host[blocks[start] * size : (blocks[at - 1] + 1) * size])
                start = at
        return views
