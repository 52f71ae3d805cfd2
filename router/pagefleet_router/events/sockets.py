"""The two connections to one engine's KV events: what it publishes, and its answers about what was missed.

Nothing is bound and nobody else can connect: a router hears those that it has called, and with a fleet key only those
that have it too. Sockets are read without waiting; the event loop says when there may be something to read.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import zmq
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_events import MAX_BATCH_BYTES, TOPIC, Request, encode
from zmq.utils import z85

QUEUED_MESSAGES = 1000
"""More that come while this process is busy are lost, and recovered as a gap."""
HEARTBEAT_MS = 10_000
SILENCE_MS = 30_000
HANDSHAKE_MS = 5_000
RECONNECT_MS = 200
MAX_RECONNECT_MS = 5_000


class EventSockets:
    """Connections to one engine, until the end of the `with` block.

    Args:
        context: makes the sockets.
        host: of the engine.
        port: where it publishes; the next one answers.
        key: of the fleet; None: nothing is encrypted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, key: FleetKey | None) -> None:
        self._context = context
        self._address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        self._port = port
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._published, self._answers = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def reconnect(self) -> None:
        """Begin anew: what was under way is lost."""
        self._close()
        self._published, self._answers = self._open()
        self._readable.set()

    def ask(self, request: Request) -> None:
        """Send a question. What cannot be sent is not: its answer will be missed."""
        try:
            self._answers.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return
        self._readable.set()  # sending may have used up the signal that something has come

    def take_answer(self) -> list[bytes] | None:
        """Return the frames of the next answer, None where there is none yet."""
        return _receive(self._answers)

    def take_published(self) -> list[bytes] | None:
        """Return the frames of the next message, None where there is none yet."""
        return _receive(self._published)

    async def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to take. To be called when both had nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable.wait()
        except TimeoutError:
            return
        self._readable.clear()

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        published = self._connect(zmq.SUB, self._port)
        answers = self._connect(zmq.DEALER, self._port + 1)
        published.setsockopt(zmq.SUBSCRIBE, TOPIC)
        return published, answers

    def _connect(self, kind: int, port: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.IPV6, 1)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        opened.setsockopt(zmq.SNDHWM, 16)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        opened.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        opened.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        if self._key is not None:
            secret = z85.encode(self._key.curve_secret("router"))
            opened.setsockopt(zmq.CURVE_SECRETKEY, secret)
            opened.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            opened.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(self._key.curve_secret("engine"))))
        opened.connect(f"{self._address}:{port}")
        self._loop.add_reader(opened.fileno(), self._readable.set)
        return opened

    def _close(self) -> None:
        for opened in (self._published, self._answers):
            self._loop.remove_reader(opened.fileno())
            opened.close(linger=0)


def _receive(source: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
