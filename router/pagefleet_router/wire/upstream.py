"""One connection to an engine: a request at a time, kept alive in between."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol, cast

import httptools

from pagefleet_router.errors import Failure
from pagefleet_router.wire.http_names import MAX_HEAD_BYTES

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
_FIND_LOST_HOSTS = tuple((getattr(socket, name), value) for name, value in _KEEPALIVE.items() if hasattr(socket, name))
"""A host that vanished says nothing, and an engine may rightly say nothing for long: the kernels can tell these apart,
in 25 seconds where the system has these options, and in hours by default."""


class AnswerHead:
    """The head of an engine's answer.

    Args:
        status: the HTTP status.
        headers: with names in lower case. Of one that is there twice the last counts, but both are passed on.
    """

    __slots__ = ("fields", "has_length", "headers", "is_event_stream", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers
        self.fields = dict(headers)
        self.has_length = b"content-length" in self.fields
        self.is_event_stream = status == 200 and self.fields.get(b"content-type", b"").startswith(b"text/event-stream")
        """Whether this is a good answer made of events."""

    @property
    def closes(self) -> bool:
        """Whether the engine says that it closes the connection."""
        return self.fields.get(b"connection", b"").lower() == b"close"


class AnswerListener(Protocol):
    """Who waits for an answer. After `complete` or `on_lost` nothing more is called."""

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Take what one read brought: the head when it has just come, bytes of the body, whether that was all."""

    def on_lost(self, failure: Failure) -> None:
        """Learn that the answer will not be complete."""


class UpstreamConnection(asyncio.Protocol):
    """Relays one answer after another to whoever sent the request.

    `on_idle` is called when an answer was complete and the connection can be used again; `on_closed` when it is gone.
    """

    def __init__(self, owner: UpstreamOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._listener: AnswerListener | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._head: AnswerHead | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self.num_sent = 0
        """Requests sent on it; a second one may find that the engine has just closed it."""
        self.idle_since = 0.0
        self._reset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; small writes must not wait for acknowledgements."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        self._owner.on_open(self)
        raw = self._transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _FIND_LOST_HOSTS:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, request: list[bytes], listener: AnswerListener) -> None:
        """Send one request, given in pieces. The connection must be idle."""
        assert self._transport is not None
        assert self._listener is None
        self._listener = listener
        self.num_sent += 1
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)

    @property
    def usable(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._listener is None

    def pause(self) -> None:
        """Stop reading: whoever listens cannot keep up."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Close at once and call nobody: the engine sees that its client is gone."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse the framing and pass on what is inside, once per read."""
        if self._listener is None:
            self.abandon()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(Failure.GARBAGE)
            return
        if not self._head_done:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._fail(Failure.GARBAGE)
            return
        self._pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the listener: that was all, if the connection's end was to mark the end; else the answer is lost."""
        self._owner.on_closed(self)
        self._transport = None
        self._parser = None  # it refers back: a cycle would keep both until the next full collection
        listener = self._listener
        if listener is None:
            return
        self._listener = None
        if exc is None and self._head_done and self._until_close and not self._complete:
            listener.on_answer(None, b"", True)
        else:
            listener.on_lost(Failure.RESET)

    def on_message_begin(self) -> None:
        """Start an answer; a second one in the same read is nobody's."""
        if self._complete:
            raise httptools.HttpParserError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header of the head."""
        if not self._head_done:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note the head, unless it is an interim answer."""
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            return
        head = self._head = AnswerHead(status, self._headers)
        self._head_done = True
        self._until_close = not (head.has_length or b"transfer-encoding" in head.fields or status in {204, 304})

    def on_body(self, data: bytes) -> None:
        """Collect what this read holds."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Note the end."""
        if self._interim:
            self._headers = []
        else:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    def _pass_on(self) -> None:
        listener = self._listener
        assert listener is not None
        head, complete = self._head, self._complete
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._head = None
        self._parts = []
        if complete:
            self._listener = None
            if self._keep_alive:
                self._reset()
                self._owner.on_idle(self)
            else:
                self.abandon()
        if head is not None or body or complete:
            listener.on_answer(head, body, complete)

    def _fail(self, failure: Failure) -> None:
        listener = self._listener
        self.abandon()
        if listener is not None:
            listener.on_lost(failure)

    def _reset(self) -> None:
        self._head, self._headers, self._parts = None, [], []
        self._head_done = self._complete = self._interim = self._until_close = False
        self._keep_alive = False
        self._num_head_bytes = 0


class UpstreamOwner(Protocol):
    """Who keeps connections between requests."""

    def on_open(self, connection: UpstreamConnection) -> None:
        """Count a connection."""

    def on_idle(self, connection: UpstreamConnection) -> None:
        """Take back a connection."""

    def on_closed(self, connection: UpstreamConnection) -> None:
        """Forget a connection."""
