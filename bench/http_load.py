"""A load generator on asyncio protocols: closed loops of whole answers, and streams at a fixed rate.

Times are taken when bytes reach this process. One connection carries one request at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools


@dataclass(slots=True)
class Sample:
    """One request, in seconds from its sending."""

    first_byte: float
    """Until the first byte of the body."""
    total: float
    longest_pause: float
    status: int
    body: bytes = b""
    """Where the connection keeps it."""


class ClientConnection(asyncio.Protocol):
    """Sends one request at a time and reports its sample."""

    def __init__(self, keep_body: bool = False) -> None:
        self._kept: list[bytes] | None = [] if keep_body else None
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Sample] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sent = self._first = self._last = self._pause = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        if self._kept is not None:
            self._kept.append(body)
        if not self._first:
            self._first = now
        elif now - self._last > self._pause:
            self._pause = now - self._last
        self._last = now

    def on_message_complete(self) -> None:
        assert self._done is not None
        now = time.perf_counter()
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        body = b"".join(self._kept or ())
        sample = Sample((self._first or now) - self._sent, now - self._sent, self._pause, status, body)
        if not self._done.done():
            self._done.set_result(sample)

    @property
    def has_begun(self) -> bool:
        """Whether the answer's body has begun."""
        return self._first > 0

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()

    def request(self, raw: bytes) -> asyncio.Future[Sample]:
        """Send the bytes of one request."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._first = self._pause = 0.0
        if self._kept is not None:
            self._kept = []
        self._sent = time.perf_counter()
        self._transport.write(raw)
        return self._done


@dataclass
class Pool:
    """Connections to one server, reused."""

    host: str
    port: int
    keep_bodies: bool = False
    _idle: deque[ClientConnection] = field(default_factory=deque)

    async def take(self) -> ClientConnection:
        """An idle connection, or a new one."""
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: ClientConnection(self.keep_bodies), self.host, self.port)
        return protocol

    def give(self, connection: ClientConnection) -> None:
        """Return a connection whose answer is complete."""
        self._idle.append(connection)

    def close(self) -> None:
        """Leave all that are idle."""
        while self._idle:
            self._idle.pop().close()


def raw_request(host: str, path: str, body: bytes) -> bytes:
    """The bytes of a POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def closed_loop(pool: Pool, requests: Sequence[bytes], connections: int, seconds: float) -> list[Sample]:
    """Keep `connections` requests in flight for `seconds`."""
    samples: list[Sample] = []
    stop_at = time.perf_counter() + seconds

    async def one(number: int) -> None:
        connection = await pool.take()
        while time.perf_counter() < stop_at:
            samples.append(await connection.request(requests[number % len(requests)]))
            number += connections
        pool.give(connection)

    await asyncio.gather(*(one(number) for number in range(connections)))
    return samples


async def open_loop(pool: Pool, requests: Sequence[bytes], per_second: float, seconds: float) -> list[Sample]:
    """Start requests at an even rate, whether or not earlier ones have ended."""
    samples: list[Sample] = []

    async def one(raw: bytes) -> None:
        connection = await pool.take()
        samples.append(await connection.request(raw))
        pool.give(connection)

    started, tasks = time.perf_counter(), []
    for number in range(int(per_second * seconds)):
        await asyncio.sleep(max(0.0, started + number / per_second - time.perf_counter()))
        tasks.append(asyncio.create_task(one(requests[number % len(requests)])))
    await asyncio.gather(*tasks)
    return samples
