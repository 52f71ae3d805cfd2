"""The client's side of an exchange: what it is sent, whichever engines that comes from."""

from __future__ import annotations

import math
from typing import Protocol

from pagefleet_protocol.errors import ErrorShape, error_event

from pagefleet_router.errors import Failure, Refusal, refusal_of
from pagefleet_router.exchange.answer_writer import AnswerWriter
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.prefix.knowledge import BYTES_PER_TOKEN
from pagefleet_router.wire.client_connection import HoldTiming
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.upstream import AnswerHead

_MAX_ERROR_BYTES = 64 * 1024
COMMENT = b": waiting\n\n"
"""Readers of event streams skip it."""


class ClientSide(Protocol):
    """Where an answer goes."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def finish(self, keep_alive: bool) -> None:
        """The answer is complete."""

    def refuse(self, refusal: Refusal) -> None:
        """Send a whole error answer."""

    def abort(self) -> None:
        """Close at once: the client must see that the answer is not whole."""


class Delivery:
    """Writes one answer.

    A stream that waits may begin before any engine has answered, so that neither its client nor a proxy in between
    gives up. From then on all that happens to it has to be told in events.

    Args:
        request: what is answered.
        client: who gets it.
        timing: when a waiting client hears of it.
    """

    __slots__ = (
        "_client", "_comment_at", "_error", "_first_read_at", "_last", "_last_read_at", "_late_headers", "_num_reads",
        "_request", "_tape", "_timing", "_writer", "explanation", "relayed", "status",
    )  # fmt: skip

    def __init__(self, request: ClientRequest, client: ClientSide, timing: HoldTiming) -> None:
        self.status = 0
        self.relayed = False
        """Whether the client has been sent anything of an engine."""
        self.explanation = b""
        """A header line of its own."""
        self._request = request
        self._client = client
        self._timing = timing
        self._writer: AnswerWriter | None = None
        self._error: bytes | None = None
        """What there is of an engine's error answer that has to become an event."""
        self._last = b""
        """What ends the answer."""
        self._late_headers = b""
        """Headers about the engine, as a comment: the head was sent before there was one."""
        self._tape: StreamTape | None = None
        """Of the engine that is asked, for an answer that begins before it has said anything."""
        self._comment_at = math.inf
        self._num_reads = 0
        self._first_read_at = self._last_read_at = 0.0

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._writer is not None and self._writer.begun

    @property
    def is_stream(self) -> bool:
        """Whether the answer is made of events."""
        return self._writer is not None and self._writer.is_stream

    @property
    def first_read_at(self) -> float | None:
        """When the client was sent the first bytes of an engine's answer; None: it has none yet."""
        return self._first_read_at if self.relayed else None

    @property
    def num_bytes(self) -> int:
        """Bytes of body that the client was sent."""
        return 0 if self._writer is None else self._writer.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; without a stream, bytes make as many as in a prompt."""
        if self._writer is not None and self._writer.is_stream:
            return self._writer.num_tokens
        return self.num_bytes // BYTES_PER_TOKEN

    def wait(self, now: float) -> None:
        """Note that the client of a stream waits from now on."""
        self._comment_at = now + self._timing.first

    def ask(self, now: float) -> None:
        """Note that an engine is being asked for a stream, which may take long to compute the prompt."""
        if not self.begun:
            self._comment_at = now + self._timing.at_engine

    def check(self, now: float) -> None:
        """Write to a client that waits; the first time with the head of its answer."""
        if now < self._comment_at:
            return
        if self._writer is None:
            self.status = 200
            self._writer = AnswerWriter(self._request, held_head(), self._own_headers(b""), self._tape)
        self._client.write(self._writer.comment(COMMENT))
        self._comment_at = now + self._timing.period

    def next_engine(self, tape: StreamTape | None) -> None:
        """Expect another engine's answer; forget what the last one only began to say."""
        self._tape = tape
        if self._writer is not None and self._writer.begun:
            self._writer.next_engine(tape)
        else:
            self._writer = None

    def take_head(self, head: AnswerHead, engine_id: str, tape: StreamTape | None) -> bool:
        """Take the head of an engine's answer; returns False when it does not fit what the client has already."""
        if not self.begun:
            self.status = head.status
            self._writer = AnswerWriter(self._request, head, self._own_headers(engine_id.encode()), tape)
        elif not head.is_event_stream:
            if self.relayed:
                return False
            self._error = b""
        elif not self.relayed:
            self._late_headers = b": %s\n\n" % self._about(engine_id.encode()).rstrip().replace(b"\r\n", b"\n: ")
        self._comment_at = math.inf
        return True

    def take(self, body: bytes, complete: bool, now: float) -> bool:
        """Pass on bytes of an engine's answer; returns whether that was all, so that `finish` may end it."""
        writer = self._writer
        assert writer is not None
        if self._error is not None:
            return self._take_error(writer, body, complete)
        data = writer.encode(body, complete)
        if not data:
            return complete
        if not self.relayed:
            self.relayed = True
            self._first_read_at = now
            if self._late_headers:
                data = writer.comment(self._late_headers) + data
        self._last_read_at = now
        self._num_reads += 1
        self._client.write(data)
        return complete

    def finish(self) -> bool:
        """End the answer, of which nothing is missing; returns whether its end is an engine's error."""
        assert self._writer is not None
        if self._last:
            self._client.write(self._last)
        self._client.finish(self._writer.keep_alive)
        return self._error is not None

    def finish_framing(self) -> None:
        """End a stream whose last event the client has already."""
        assert self._writer is not None
        self._last = self._writer.end()
        self.finish()

    def cut(self, refusal: Refusal) -> bool:
        """End in whichever way is still open; returns whether that is an event."""
        writer = self._writer
        if writer is None or not writer.begun:
            self.status = refusal.status
            self._client.refuse(refusal)
            return False
        event = writer.last_event(refusal.fault.event(self._request.shape, self._num_events))
        if event is None:
            self._client.abort()
            return False
        self._client.write(event)
        self._client.finish(writer.keep_alive)
        return True

    def token_seconds(self) -> float | None:
        """Return the mean time between two reads of a stream; None where there are none."""
        if self._num_reads < 2 or self._writer is None or not self._writer.is_stream:
            return None
        return (self._last_read_at - self._first_read_at) / (self._num_reads - 1)

    def _take_error(self, writer: AnswerWriter, body: bytes, complete: bool) -> bool:
        assert self._error is not None
        self._error += body
        if not complete and len(self._error) <= _MAX_ERROR_BYTES:
            return False
        shape, number = self._request.shape, self._num_events
        event = engines_error(self._error, shape, number) if complete else None
        self._last = writer.last_event(event or refusal_of(Failure.STATUS).fault.event(shape, number)) or b""
        return True

    @property
    def _num_events(self) -> int:
        """That the client has, as far as they are numbered."""
        return 0 if self._tape is None else self._tape.num_events

    def _own_headers(self, engine_id: bytes) -> bytes:
        cors = [part for name, value in self._request.cors for part in (name, b": ", value, b"\r\n")]
        return b"".join((b"x-request-id: ", self._request.request_id, b"\r\n", *cors, self._about(engine_id)))

    def _about(self, engine_id: bytes) -> bytes:
        """Return the headers that say who answers, and why."""
        engine = b"x-pagefleet-engine: %s\r\n" % engine_id if engine_id else b""
        return engine + self.explanation


def held_head() -> AnswerHead:
    """Return the head of an event stream that begins before any engine has answered."""
    return AnswerHead(
        200,
        [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ],
    )


def engines_error(body: bytes, shape: ErrorShape, number: int) -> bytes | None:
    """Return an engine's error answer as an event; None where it does not fit on a line."""
    text = body.strip()
    if not text.startswith(b"{") or b"\n" in text or b"\r" in text:
        return None
    return error_event(text, shape, number)
