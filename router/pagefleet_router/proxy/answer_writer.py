"""The answer as a client gets it: a new head around the engine's bytes."""

from __future__ import annotations

from pagefleet_router.errors import Refusal
from pagefleet_router.proxy.client_request import ClientRequest
from pagefleet_router.proxy.http_names import LAST_CHUNK, NOT_RETURNED, chunk, status_line
from pagefleet_router.proxy.sse import EventHold
from pagefleet_router.proxy.upstream import AnswerHead


class AnswerWriter:
    """Frames one answer."""

    def __init__(self, request: ClientRequest, head: AnswerHead, engine_id: str) -> None:
        self.keep_alive = request.keep_alive
        """False: the connection has to end after this answer."""
        self.num_bytes = 0
        self._head: AnswerHead | None = head
        self._engine_id = engine_id
        self._request_id = request.request_id
        self._http_1_0 = request.http_1_0
        self._has_length = self._is_stream = False
        for name, value in head.headers:
            if name == b"content-length":
                self._has_length = True
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self._is_stream = head.status == 200
        self._chunked = False
        self._events = EventHold() if self._is_stream and not self._has_length else None

    def encode(self, body: bytes, complete: bool) -> bytes:
        """Return what to send for bytes of the body, with the head in front of the first ones.

        The head waits for them: as long as nothing was sent, another engine can still be asked.
        """
        if self._events is not None:
            body = self._events.push(body)
            if complete:
                body += self._events.rest()
        self.num_bytes += len(body)
        if self._head is not None:
            return self._first(self._head, body, complete) if body or complete else b""
        if not self._chunked:
            return body
        return (chunk(body) if body else b"") + (LAST_CHUNK if complete else b"")

    def error_event(self, refusal: Refusal) -> bytes | None:
        """Return the end of a stream that breaks off; None when this answer cannot carry one."""
        if self._events is None or self._head is not None:
            return None
        event = refusal.event()
        return chunk(event) + LAST_CHUNK if self._chunked else event

    def _first(self, head: AnswerHead, body: bytes, complete: bool) -> bytes:
        lines = [status_line(head.status)]
        lines += [b"%b: %b\r\n" % header for header in head.headers if header[0] not in NOT_RETURNED]
        lines.append(b"x-request-id: %b\r\nx-pagefleet-engine: %b\r\n" % (self._request_id, self._engine_id.encode()))
        if not self._has_length and head.status not in {204, 304}:
            if complete:
                lines.append(b"content-length: %d\r\n" % len(body))
            elif self._http_1_0:
                self.keep_alive = False
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if body:
            lines.append(chunk(body) if self._chunked else body)
        self._head = None
        return b"".join(lines)
