"""Bytes of a client connection to requests: httptools' parser, plus the limits and refusals it leaves to us."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import Any

import httptools

from pagefleet_router.errors import Refusal, overloaded
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import HOST, MAX_HEAD_BYTES, MAX_HEADERS
from pagefleet_router.wire.memory import SMALL_BYTES, BodyMemory

_MAX_PIPELINED = 32
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
_LENGTHS = (b"content-length", b"transfer-encoding")
_CHUNK_OVERHEAD = 8
"""Bytes on the wire per byte of body, at most: one-byte chunks cost six."""


class RequestParser:
    """Parses one connection. Complete requests gather in `ready`.

    Args:
        max_body_bytes: limit of a body, however it is framed.
        on_head: called when a request's head is complete; may set its `refusal`.
        memory: of all connections.
    """

    def __init__(self, max_body_bytes: int, on_head: Callable[[ClientRequest], None], memory: BodyMemory) -> None:
        self.ready: deque[ClientRequest] = deque()
        self.in_message = False
        """Whether a request has begun and is not complete."""
        self.refused: ClientRequest | None = None
        """Whose head was refused before a body that is not worth reading: the last one."""
        self._max_body_bytes = max_body_bytes
        self._on_head = on_head
        self._memory = memory
        self._parser: Any = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None
        self._body: bytes | BytesIO = b""
        self._num_body_bytes = 0
        self._begin()

    @property
    def in_body(self) -> bool:
        """Whether a request's head is complete and its body is not."""
        return self.in_message and not self._in_head

    def close(self) -> None:
        """Let go of what was read and will not be answered. Nothing may be fed any more."""
        for request in (self._request, *self.ready):
            self._memory.give_back(request)
        # Both refer back: such a cycle would keep the connection until the next full collection.
        self._parser, self._on_head = None, _ignore_head

    def feed(self, data: bytes) -> None:
        """Parse what came.

        Raises:
            Refusal: this and everything after it cannot be read; answer, and close.
        """
        if self._in_head:
            self._unread_bytes += len(data)
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            raise self._refusal or Refusal(400, "The request is not valid HTTP/1.1.", code="invalid_http") from None
        if self._in_head and self._unread_bytes > MAX_HEAD_BYTES:
            raise head_too_large()
        if self._wire_bytes > _CHUNK_OVERHEAD * self._num_body_bytes + 4 * MAX_HEAD_BYTES + len(data):
            raise Refusal(400, "The request has too much framing for its body.", code="invalid_http")

    def on_message_begin(self) -> None:
        """Start a request."""
        if len(self.ready) >= _MAX_PIPELINED:
            self._refuse(Refusal(400, "Too many requests were sent without waiting for answers.", code="invalid_http"))
        self._begin()
        self.in_message = True

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._num_head_bytes += len(url)
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; those after the body are read over."""
        if not self._in_head:
            return
        headers = self._request.headers
        self._num_head_bytes += len(name) + len(value) + 4
        if len(headers) >= MAX_HEADERS or self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(head_too_large())
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check what the head says about itself and its body, then show it to `on_head`."""
        self._in_head = False
        self._unread_bytes = 0
        request = self._request
        request.fields = dict(request.headers)
        request.method = self._parser.get_method().decode()
        request.http_1_0 = self._parser.get_http_version() != "1.1"
        self._upgrading = self._parser.should_upgrade()
        if request.method == "CONNECT":  # whatever follows would be of a tunnel
            self._refuse(Refusal(400, "This server is no proxy: it takes no CONNECT.", code="invalid_http"))
        if self._upgrading:
            return
        try:
            declared = check_framing(request)
            if declared > self._max_body_bytes:
                raise self._body_too_large()
        except Refusal as refusal:
            self._refuse(refusal)
        self._on_head(request)
        if request.refusal is not None and (declared > SMALL_BYTES or b"transfer-encoding" in request.fields):
            self.refused = request
            self._refuse(request.refusal)

    def on_body(self, data: bytes) -> None:
        """Collect the body, unless the head was refused."""
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._max_body_bytes:
            self._refuse(self._body_too_large())
        if self._request.refusal is not None:
            return
        if self._num_body_bytes > SMALL_BYTES and not self._memory.take(self._request, self._num_body_bytes):
            self._refuse(overloaded())
        if not self._body:
            self._body = data  # most bodies come in one piece
            return
        if isinstance(self._body, bytes):
            first, self._body = self._body, BytesIO()
            self._body.write(first)
        self._body.write(data)

    def on_message_complete(self) -> None:
        """Hand the request on."""
        if self._upgrading:
            return
        request = self._request
        request.body = self._body if isinstance(self._body, bytes) else self._body.getvalue()
        request.keep_alive = request.keep_alive and self._parser.should_keep_alive()
        self._body = b""
        self.in_message = False
        self._wire_bytes = self._num_body_bytes = 0
        self._in_head = True
        self.ready.append(request)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it had not offered another protocol, which a server may ignore (RFC 9110, 7.8).

        Java's HTTP client offers h2c with every request; httptools would take the body for the other protocol.
        """
        request = self._request
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.target)]
        lines += [b"%b: %b\r\n" % header for header in request.headers if header[0] not in _UPGRADE_HEADERS]
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"".join([*lines, b"\r\n", rest]))

    def _begin(self) -> None:
        self._request = ClientRequest()
        self._in_head = True
        self._upgrading = False
        self._unread_bytes = 0
        self._num_head_bytes = 0
        self._wire_bytes = 0
        self._num_body_bytes = 0
        self._body = b""

    def _refuse(self, refusal: Refusal) -> None:
        # Only httptools' own error leaves its parser; ours is kept aside.
        self._refusal = refusal
        raise refusal

    def _body_too_large(self) -> Refusal:
        limit = self._max_body_bytes
        return Refusal(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def _ignore_head(request: ClientRequest) -> None:
    """Nobody is left to be shown it."""


def check_framing(request: ClientRequest) -> int:
    """Return the declared length of the body, 0 when it is chunked or absent.

    Raises:
        Refusal: two readers of this head could disagree on where the request ends or whom it is for.
    """
    fields = request.fields
    length, coding, host = fields.get(b"content-length"), fields.get(b"transfer-encoding"), fields.get(b"host")
    is_any_twice = len(fields) < len(request.headers)
    if (length is not None and coding is not None) or (is_any_twice and _is_twice(request, *_LENGTHS)):
        raise Refusal(400, "The request's length is given more than once.", code="invalid_http")
    if coding is not None and (coding.lower() != b"chunked" or request.http_1_0):
        raise Refusal(400, "The only transfer coding is 'chunked', in HTTP/1.1.", code="invalid_http")
    is_host_good = request.http_1_0 if host is None else is_host(host)
    if not is_host_good or (is_any_twice and _is_twice(request, b"host")):
        raise Refusal(400, "The request needs one valid Host header.", code="invalid_host")
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 18:
        raise Refusal(400, "Content-Length is not a number.", code="invalid_http")
    return int(length)


@lru_cache(maxsize=256)  # clients name the same few again and again
def is_host(name: bytes) -> bool:
    """Whether a Host header's value is one."""
    return HOST.fullmatch(name) is not None


def _is_twice(request: ClientRequest, *names: bytes) -> bool:
    return any(len(request.values(name)) > 1 for name in names)


def head_too_large() -> Refusal:
    """Return the answer to a head over the limits."""
    message = f"The request's head is over {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers."
    return Refusal(431, message, code="head_too_large")
