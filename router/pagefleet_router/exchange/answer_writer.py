"""The answer as a client gets it: a new head around the engine's bytes, event by event where it is a stream."""

from __future__ import annotations

from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import LAST_CHUNK, NOT_RETURNED, OWN_PREFIX, chunk, status_line
from pagefleet_router.wire.upstream import AnswerHead


class AnswerWriter:
    """Frames one answer, which may come from several engines, one after the other.

    Args:
        request: what is answered.
        head: the engine's, or our own for a stream that is held.
        own: header lines of ours.
        tape: takes the notes out of an event stream.
    """

    __slots__ = (
        "_chunked",
        "_events",
        "_has_length",
        "_head",
        "_http_1_0",
        "_num_events",
        "_own",
        "begun",
        "is_stream",
        "keep_alive",
        "num_bytes",
        "tape",
    )  # fmt: skip

    def __init__(self, request: ClientRequest, head: AnswerHead, own: bytes, tape: StreamTape | None = None) -> None:
        self.keep_alive = request.keep_alive
        """False: the connection has to end after this answer."""
        self.begun = False
        """Whether the head has been sent."""
        self.num_bytes = 0
        self._num_events = 0
        self._own = own
        self._http_1_0 = request.http_1_0
        self._has_length = head.has_length
        self.is_stream = head.is_event_stream
        if self._has_length and self.is_stream and tape is not None:
            head = AnswerHead(head.status, [one for one in head.headers if one[0] != b"content-length"])
            self._has_length = False  # it counts the notes
        self._head: AnswerHead | None = head
        self._chunked = False
        self._events = EventHold() if self.is_stream and not self._has_length else None
        self.tape = tape if self._events is not None else None

    @property
    def num_tokens(self) -> int:
        """Of a stream: as the notes count them; without notes an event is taken as one."""
        return self.tape.num_tokens if self.tape is not None and self.tape.noted else self._num_events

    def encode(self, body: bytes, complete: bool) -> bytes:
        """Return what to send for bytes of the body, with the head in front of the first ones.

        The head waits for them: as long as nothing was sent, another engine can still be asked. When the tape fails,
        this is no end.
        """
        if self._events is not None:
            body = self._events.push(body)
            if complete:
                body += self._events.rest()
            if self.tape is not None and body:
                body = self.tape.take(body)
                complete = complete and self.tape.failure is None
        self.num_bytes += len(body)
        if self.is_stream:
            self._num_events += count_events(body)
        if self._head is not None:
            return self._first(self._head, body, complete) if body or complete else b""
        if not self._chunked:
            return body
        return (chunk(body) if body else b"") + (LAST_CHUNK if complete else b"")

    def end(self) -> bytes:
        """Return what ends the framing of an answer that has begun."""
        return LAST_CHUNK if self._chunked else b""

    def comment(self, text: bytes) -> bytes:
        """Return what to send for a comment of ours, which stands between events."""
        if self._head is not None:
            return self._first(self._head, text, False)
        return chunk(text) if self._chunked else text

    def next_engine(self, tape: StreamTape | None) -> None:
        """Forget the event that an engine left half said: another one goes on."""
        if self._events is not None:
            self._events.rest()
            self.tape = tape

    def last_event(self, event: bytes) -> bytes | None:
        """Return the end of a stream that breaks off; None when this answer cannot carry one."""
        if self._events is None or self._head is not None:
            return None
        return chunk(event) + LAST_CHUNK if self._chunked else event

    def _first(self, head: AnswerHead, body: bytes, complete: bool) -> bytes:
        lines = [status_line(head.status)]
        for name, value in head.headers:
            if name not in NOT_RETURNED and not name.startswith(OWN_PREFIX):
                lines += (name, b": ", value, b"\r\n")
        lines.append(self._own)
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
        self._own = b""
        self.begun = True
        return b"".join(lines)


# Server-sent events, as far as a relay must know them: where one ends.
# An event is passed on whole or not at all, so that an error event can follow whatever an engine left behind.
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_HELD = 256 * 1024
"""An event longer than this is passed on in parts."""


def count_events(events: bytes) -> int:
    """Return how many there are; each is whole."""
    return events.count(b"\n\n") + events.count(b"\r\n\r\n")


class EventHold:
    """Holds back the beginning of an event until its end came. Bytes are never changed."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> bytes:
        """Take what came and return what may be sent."""
        if not self._held and data.endswith(_ENDS):
            return data
        data = self._held + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
        if end == 0 and len(data) > _MAX_HELD:
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """Return what is still held: the stream ended on purpose."""
        data, self._held = self._held, b""
        return data
