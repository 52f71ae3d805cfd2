"""One client connection: requests in, answers out, in order, within limits of time and memory."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from pagefleet_protocol import headers

from pagefleet_router.errors import Refusal
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import render_answer
from pagefleet_router.wire.memory import BodyMemory
from pagefleet_router.wire.request_parser import RequestParser

_MAX_BACKLOG = 64 * 1024
_WRITE_HIGH, _WRITE_LOW = 64 * 1024, 16 * 1024
_LINGER_S = 2.0
_ROLE = (headers.ROLE.encode(), b"router")


@dataclass(frozen=True, slots=True)
class HoldTiming:
    """Seconds."""

    first: float = 5.0
    """Waiting that begins the answer; from then on errors are events."""
    at_engine: float = 15.0
    """The same while an engine is being asked: what it refuses it refuses sooner, and then with a true status."""
    period: float = 10.0
    """Between two comments."""


@dataclass(frozen=True, slots=True)
class ConnectionTiming:
    """Seconds."""

    head: float = 10.0
    """For a whole head, from its first byte; also for the first byte of a new connection."""
    body: float = 30.0
    """Longest pause while a body is being sent."""
    idle: float = 75.0
    """Between requests."""
    write: float = 60.0
    """For a client that does not read: its buffer stays full this long at most."""
    hold: HoldTiming = field(default_factory=HoldTiming)
    """For a stream whose request waits."""


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """What holds for every connection."""

    max_body_bytes: int
    max_connections: int
    memory: BodyMemory
    timing: ConnectionTiming = ConnectionTiming()


class OwnAnswer:
    """A whole answer of the router's own; `fields` are its headers besides those that every answer has."""

    __slots__ = ("body", "fields", "status")

    def __init__(self, body: bytes, fields: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        self.body = body
        self.fields = fields
        self.status = status


class Responder(Protocol):
    """Who is answering the current request."""

    def client_lost(self) -> None:
        """The client left."""

    def client_paused(self) -> None:
        """The client's buffer is full."""

    def client_resumed(self) -> None:
        """It has room again."""

    def check(self, now: float) -> None:
        """Look at the clock."""

    def cut(self, refusal: Refusal) -> None:
        """End now."""


class Front(Protocol):
    """What stands behind all connections."""

    def on_head(self, request: ClientRequest) -> None:
        """Check a head: fill `route`, `tenant`, `request_id`, or `refusal`."""

    def on_request(self, request: ClientRequest, client: ClientConnection) -> None:
        """Answer at once, or name who answers by `client.begin`."""

    def on_refused(self, request: ClientRequest, refusal: Refusal) -> None:
        """Note that a request was refused."""

    def on_finished(self, responder: Responder) -> None:
        """Note that a responder is through."""


class ClientConnection(asyncio.Protocol):
    """Serves one connection."""

    def __init__(
        self, front: Front, connections: set[ClientConnection], rules: ConnectionRules, clock: Callable[[], float]
    ) -> None:
        self._front = front
        self._connections = connections
        self._clock = clock
        self._max_connections = rules.max_connections
        self._timing = rules.timing
        self._memory = rules.memory
        self._parser = RequestParser(rules.max_body_bytes, self._on_head, rules.memory)
        self._transport: asyncio.Transport | None = None
        self._request: ClientRequest | None = None
        self._responder: Responder | None = None
        self._backlog = bytearray()
        self._fatal: Refusal | None = None
        self._deadline = math.inf
        self._reading = True
        self._full = False
        """Whether the client has to read before it is sent more."""
        self._closing = False
        self._last = False

    @property
    def busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self._responder is not None or self._parser.in_message or bool(self._parser.ready)

    @property
    def responder(self) -> Responder | None:
        """Who answers the current request."""
        return self._responder

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport: small writes go out at once, and few bytes are held for a slow reader."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        if len(self._connections) >= self._max_connections:
            self._drop(lost=False)
            return
        self._connections.add(self)
        raw = self._transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH, low=_WRITE_LOW)
        self._deadline = self._clock() + self._timing.head

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop what runs for this client."""
        self._connections.discard(self)
        self._closing = True
        self._deadline = math.inf
        self._release(lost=True)
        self._transport = None
        self._parser.close()

    def data_received(self, data: bytes) -> None:
        """Parse, or keep for later while a request is being answered, or its answer being read."""
        if self._closing:
            return
        if self._responder is not None or self._full:
            self._backlog += data
            if len(self._backlog) > _MAX_BACKLOG:
                self._read(False)
            return
        self._feed(data)
        self._serve()

    def eof_received(self) -> bool:
        """Take the end of the client's sending as its leaving: nobody waits for an answer without listening on."""
        return False

    def pause_writing(self) -> None:
        """The client reads too slowly: hold the engine back, for a while."""
        self._full = True
        self._deadline = self._clock() + self._timing.write
        if self._responder is not None:
            self._responder.client_paused()

    def resume_writing(self) -> None:
        """Go on."""
        self._full = False
        if self._responder is not None:
            self._deadline = math.inf
            self._responder.client_resumed()
        elif not self._closing:
            self._expect_next()

    def begin(self, responder: Responder) -> None:
        """Note who answers the current request."""
        self._responder = responder

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def finish(self, keep_alive: bool) -> None:
        """End an answer and go on to the next request."""
        self._release(lost=False)
        if not keep_alive or self._last:
            self._linger()
        elif self._full:  # no engine would be held back for the next answer: it would pile up here
            self._deadline = self._clock() + self._timing.write
        else:
            self._expect_next()

    def refuse(self, refusal: Refusal) -> None:
        """Send an error answer, and go on or close."""
        request = self._request
        keep_alive = request is not None and request.keep_alive and "connection" not in refusal.headers
        fields = [(b"content-type", b"application/json")]
        if request is not None and request.request_id:
            fields.append((b"x-request-id", request.request_id))
        fields += [(name.encode(), value.encode()) for name, value in refusal.headers.items() if name != "connection"]
        if request is not None:
            fields += request.cors
        body = refusal.body() if request is None else refusal.body(request.shape)
        self.write(render_answer(refusal.status, fields, body, keep_alive))
        self.finish(keep_alive)

    def answer(self, answer: OwnAnswer) -> None:
        """Send a whole answer of our own."""
        request = self._request
        assert request is not None
        fields, body = [*answer.fields, (b"x-request-id", request.request_id), _ROLE, *request.cors], answer.body
        data = render_answer(answer.status, fields, body, request.keep_alive)
        self.write(data[: len(data) - len(body)] if request.method == "HEAD" else data)
        self.finish(request.keep_alive)

    def abort(self) -> None:
        """Close at once."""
        self._drop(lost=False)

    def close_now(self) -> None:
        """Close, and let go of the engine that works for this client."""
        self._drop(lost=True)

    def close_when_idle(self) -> None:
        """Close now, or after the request that is being read or answered."""
        self._last = True
        if not self.busy:
            self._linger()

    def check(self, now: float) -> None:
        """Look at the clock: drop a client that is too slow, or let the responder look at its engine."""
        if now > self._deadline:
            self._drop(lost=True)
        elif self._responder is not None:
            self._responder.check(now)

    def _drop(self, lost: bool) -> None:
        self._closing = True
        self._release(lost)
        if self._transport is not None:
            self._transport.abort()

    def _on_head(self, request: ClientRequest) -> None:
        request.began_at = self._clock()
        self._front.on_head(request)
        expects = request.values(b"expect")
        if expects and request.refusal is None and self._responder is None and not self._parser.ready:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        was_in_message = parser.in_message
        try:
            parser.feed(data)
        except Refusal as refusal:
            self._fatal = refusal
            self._read(False)
        if parser.in_body:
            self._deadline = self._clock() + self._timing.body
        elif parser.in_message and not was_in_message:
            self._deadline = self._clock() + self._timing.head

    def _expect_next(self) -> None:
        self._deadline = self._clock() + (self._timing.head if self._parser.in_message else self._timing.idle)
        if self._backlog or self._parser.ready or self._fatal is not None:
            # Not from here: a client that pipelines must not grow our stack, nor keep others from their turn.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._closing or self._responder is not None or self._full:
            return
        if not self._parser.ready and self._backlog:
            data = bytes(self._backlog)
            self._backlog.clear()
            self._feed(data)
        self._read(True)
        self._serve()

    def _serve(self) -> None:
        """Begin with the next complete request, or say why there will be none."""
        if self._parser.ready and self._responder is None and not self._closing:
            request = self._request = self._parser.ready.popleft()
            self._deadline = math.inf
            if request.refusal is not None:
                self._front.on_refused(request, request.refusal)
                self.refuse(request.refusal)
                return
            self._front.on_request(request, self)
            return
        if self._fatal is not None and not self._closing:
            refused = self._request = self._parser.refused
            fatal, self._fatal = self._fatal, None
            if refused is not None:
                refused.keep_alive = False
                self._front.on_refused(refused, fatal)
            self.refuse(fatal)

    def _release(self, lost: bool) -> None:
        responder, self._responder = self._responder, None
        if self._request is not None and self._request.num_counted:
            self._memory.give_back(self._request)
        if responder is None:
            return
        if lost:
            responder.client_lost()
        self._front.on_finished(responder)

    def _read(self, on: bool) -> None:
        if self._transport is None or self._transport.is_closing() or on == self._reading:
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _linger(self) -> None:
        """Close once the client could read: unread bytes of its own would turn our close into a reset."""
        self._closing = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._read(True)
        if transport.can_write_eof():
            transport.write_eof()
            unsent = transport.get_write_buffer_size()
            self._deadline = self._clock() + (self._timing.write if unsent else _LINGER_S)
        else:
            transport.close()
