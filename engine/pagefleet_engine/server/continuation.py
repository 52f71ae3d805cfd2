"""Streams that another engine can continue, and streams that continue another engine's.

Before each event stands a note for the router: the tokens whose text the event is the first to show (with those that
show none yet), and how much text the client has then. Marks among the tokens stand for events that show no text. So
what the router gives back says of every event whether the client has it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pagefleet_protocol.handoff import COUNTED, ENDED, MARKS, OPENED, StreamState, encode_note

from pagefleet_engine.engine_core.output_text import OutputSoFar
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.generation import Chunks
from pagefleet_engine.server.handoff import Handed
from pagefleet_engine.server.ports import Chunk
from pagefleet_engine.server.request_ids import new_id
from pagefleet_engine.server.responses import EventStream
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.sse import AnswerHead, EventWriter, event_stream


@dataclass(frozen=True, slots=True)
class NotedStream:
    """A stream with notes: what the router calls it, and what the client has of it."""

    state: StreamState
    marks: frozenset[int]
    so_far: OutputSoFar | None
    """None: no token of it was shown."""


def noted_stream(handed: Handed[Any], resumable: bool, max_model_len: int) -> NotedStream | None:
    """Return the stream that a router asks for; None where it asks for none, or for one that no engine could continue.

    Args:
        handed: the request.
        resumable: whether it asks for one streamed answer that begins with generated text.
        max_model_len: no answer has more tokens.

    Raises:
        HttpRefusal: 409, it is to be continued and is not resumable.
        InvalidRequest: text was shown and no token, or more tokens than an answer can have.
    """
    state = handed.head.stream
    if state is None:
        return None
    if not resumable:
        if state.num_tokens:
            message = "Only a stream of one answer to one prompt, without echo, can be continued."
            raise HttpRefusal(409, message, code="cannot_resume")
        return None
    if state.num_tokens > max_model_len + len(MARKS):
        raise InvalidRequest("The stream to continue is longer than the context.", None, "invalid_handoff")
    token_ids = [token for token in handed.generated_ids if token not in MARKS]
    if state.num_chars and not token_ids:
        raise InvalidRequest("A stream without tokens has no text to continue.", None, "invalid_handoff")
    so_far = OutputSoFar(token_ids, state.num_chars) if token_ids else None
    return NotedStream(state, MARKS.intersection(handed.generated_ids), so_far)


def answer_head(prefix: str, model: str, stream: NotedStream | None) -> AnswerHead:
    """Return what an answer is called: as the router says, where it says so."""
    if stream is None:
        return AnswerHead(new_id(prefix), int(time.time()), model)
    return AnswerHead(f"{prefix}-{stream.state.answer_id}", stream.state.created, model)


def stream_answer(service: Service, chunks: Chunks, writer: EventWriter, stream: NotedStream | None) -> EventStream:
    """Return the response that streams `chunks`, with notes if there is a `stream` to note."""
    if stream is None:
        return EventStream(event_stream(chunks, writer), service.open_requests)
    if stream.state.num_tokens:
        service.metrics.resumed_requests.inc()
    noted = NotedEvents(writer, stream)
    return EventStream(event_stream(chunks, noted), service.open_requests, noted.note)


class NotedEvents:
    """The events of one choice, each behind its note, without those that the client has."""

    def __init__(self, writer: EventWriter, stream: NotedStream) -> None:
        self._writer = writer
        self._opened = stream.state.num_tokens > 0
        self._ended = ENDED in stream.marks
        self._counted = COUNTED in stream.marks
        self._num_chars = stream.state.num_chars
        self._token_ids: list[int] = []

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Return what a chunk adds to the stream.

        Raises:
            InvalidRequest: the client has the end of a stream that goes on.
        """
        opening, content, ending = self._writer.choices(index, chunk)
        if self._ended:
            if chunk.finish_reason is None:
                raise InvalidRequest("The stream to continue has not ended.", None, "invalid_handoff")
            return b""
        parts = []
        if opening is not None and not self._opened:
            parts.append(encode_note((OPENED,), self._num_chars) + self._writer.frame(opening))
        self._token_ids += chunk.token_ids
        if content is not None:
            self._num_chars += len(chunk.text)
            is_last = chunk.finish_reason is not None and ending is None
            parts.append(self.note(ENDED if is_last else None) + self._writer.frame(content))
        if ending is not None:
            parts.append(self.note(ENDED) + self._writer.frame(ending))
        return b"".join(parts)

    def usage_event(self) -> bytes:
        """Return the usage, if the client asked for it and has none."""
        event = b"" if self._counted else self._writer.usage_event()
        return event and self.note(COUNTED) + event

    def note(self, mark: int | None = None) -> bytes:
        """Return the note of an event that shows all tokens so far, or stands for `mark`."""
        token_ids, self._token_ids = self._token_ids, []
        if mark is not None:
            token_ids.append(mark)
        return encode_note(token_ids, self._num_chars)
