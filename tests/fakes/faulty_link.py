"""A network between a router and an engine: a TCP relay that can reset, swallow, delay or refuse. No test in here."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from typing import Literal, cast

from tests.fakes.free_ports import free_ports

LinkMode = Literal["good", "reset", "hole", "lossy", "full"]
"""What it does with connections, those that are open included.

good: passes everything on. reset: ends all with RST, new ones as soon as they are made. hole: takes bytes and passes
none on, as a network that drops every packet. lossy: three chunks of ten arrive late, as with retransmissions. full: as
hole, and answers no SYN of new ones.
"""
LATE_S = (0.05, 0.4)
_PASSING = ("good", "lossy")
_RST = struct.pack("ii", 1, 0)


class _End(asyncio.Protocol):
    """One of the two connections of a relayed one."""

    def __init__(self, link: FaultyLink, peer: _End | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer = peer
        self.is_over = self.is_late = False
        self.kept = bytearray()
        """Came and is not passed on yet."""
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._link.opened(self)

    def data_received(self, data: bytes) -> None:
        self.kept += data
        self._link.move(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        self._link.ended(self)

    def reset(self) -> None:
        """End with RST."""
        if self.transport is not None:
            raw = self.transport.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            self.transport.abort()


class FaultyLink:
    """Listens on a port of its own and relays to `target`."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.port = free_ports()
        self.num_late = 0
        self._mode: LinkMode = "good"
        self._target = target
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._fillers: list[socket.socket] = []
        self._ends: set[_End] = set()
        self._dials: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), "127.0.0.1", self.port)

    async def set(self, mode: LinkMode) -> None:
        """Change what it does from now on."""
        before, self._mode = self._mode, mode
        if mode == "full":
            self._stop_answering()
        elif before == "full":
            for filler in self._fillers:
                filler.close()
            self._fillers.clear()
            await self.start()
        for end in list(self._ends):
            if mode == "reset":
                end.reset()
            elif mode in _PASSING:
                self.move(end)
                self.ended(end)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for dial in list(self._dials):
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        await self.set("reset")
        for filler in self._fillers:
            filler.close()
        while any(not end.is_over for end in self._ends):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def opened(self, end: _End) -> None:
        """Reset a new connection, or dial the target for it."""
        self._ends.add(end)
        if self._mode == "reset":
            end.reset()
        elif end.peer is None:
            dial = asyncio.get_running_loop().create_task(self._dial(end))
            self._dials.add(dial)
            dial.add_done_callback(self._dials.discard)

    def move(self, end: _End) -> None:
        """Pass on what came, if the mode lets it."""
        peer = end.peer
        if self._mode not in _PASSING or end.is_late or peer is None or peer.transport is None or not end.kept:
            return
        if self._mode == "lossy" and self._random.random() < 0.3:
            self.num_late += 1
            end.is_late = True
            asyncio.get_running_loop().call_later(self._random.uniform(*LATE_S), self._arrive, end)
            return
        peer.transport.write(bytes(end.kept))
        end.kept.clear()

    def ended(self, end: _End) -> None:
        """Pass on an end, if the mode lets it."""
        if end.is_over and self._mode not in {"hole", "full"}:
            self._ends.discard(end)
            if end.peer is not None and end.peer.transport is not None:
                end.peer.transport.close()

    async def _dial(self, end: _End) -> None:
        with contextlib.suppress(OSError):
            _, other = await asyncio.get_running_loop().create_connection(
                lambda: _End(self, end), "127.0.0.1", self._target
            )
            end.peer = other
            self.move(end)
            if not end.is_over:
                return
        end.reset()
        if end.peer is not None:
            end.peer.reset()

    def _arrive(self, end: _End) -> None:
        end.is_late = False
        self.move(end)

    def _stop_answering(self) -> None:
        """Leave a listener whose queue is full: the kernel drops what comes, as a lost host would."""
        assert self._server is not None
        self._server.close()
        self._fillers.append(socket.create_server(("127.0.0.1", self.port), backlog=0))
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)


@contextlib.asynccontextmanager
async def faulty_link(target: int) -> AsyncIterator[FaultyLink]:
    link = FaultyLink(target)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
