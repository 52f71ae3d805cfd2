"""Answers that are told in an API's own events: the parts of one choice, written whole or as a stream that can go on.

All events that come of one chunk go together: behind a router the client has all of them or none. So what it has is
told by the tokens, the length of their text, and a number of events; of these a script is made again at another engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from pagefleet_protocol.handoff import ENDED, encode_note
from pagefleet_protocol.openai_common import Usage

from pagefleet_engine.answer_parts import AnswerParts, AnswerPlan
from pagefleet_engine.client.stream import Chunks
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.parts import Part
from pagefleet_engine.server.answers import TokenCounts
from pagefleet_engine.server.continuation import NotedStream
from pagefleet_engine.server.route import Prepared

Event = dict[str, Any]
"""`type` comes first."""


class AnswerScript(ABC):
    """Writes one answer."""

    def __init__(self) -> None:
        self.num_events = 0
        """That were framed."""

    @abstractmethod
    def opening(self, usage: Usage) -> Iterator[Event]:
        """Yield the events before any part."""

    @abstractmethod
    def grow(self, parts: Sequence[Part], chunk: Chunk) -> Iterator[Event]:
        """Yield the events of parts that came with a chunk."""

    @abstractmethod
    def closing(self, reason: str, chunk: Chunk, usage: Usage) -> Iterator[Event]:
        """Yield the last events; `reason`: stop, length, tool_calls or abort."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the answer, once it is closed."""

    def frame(self, event: Event) -> bytes:
        """Return an event as it is sent."""
        self.num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class Telling:
    """Takes the chunks of one answer to its script.

    Args:
        script: which writes it.
        parts: takes its text apart.
        counts: its tokens.
        num_events: that the client has of an answer that goes on.
    """

    def __init__(self, script: AnswerScript, parts: AnswerParts, counts: TokenCounts, num_events: int = 0) -> None:
        self.script = script
        self._parts = parts
        self._counts = counts
        self._is_open = num_events > 0
        script.num_events = num_events

    def take(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of a chunk, all of which must be taken."""
        script = self.script
        if chunk.shown:
            for _ in script.grow(self._parts.restore(0, chunk), Chunk("", ())):
                pass  # the client has these events
        self._counts.add(0, chunk)
        if not self._is_open:
            self._is_open = True
            yield from script.opening(self._counts.usage())
        yield from script.grow(self._parts.take(0, chunk), chunk)
        if chunk.finish_reason is not None:
            held, reason = self._parts.finish(0, chunk)
            yield from script.grow(held, chunk)
            yield from script.closing(reason, chunk, self._counts.usage())


def telling_of(script: AnswerScript, prepared: Prepared[Any, AnswerPlan]) -> Telling:
    """Return what takes the chunks of a prepared answer to its script."""
    num_events = 0 if prepared.stream is None else prepared.stream.state.num_events
    parts = prepared.plan.parts(prepared.head.id)
    return Telling(script, parts, TokenCounts(prepared.generation, parts), num_events)


async def tell_whole(telling: Telling, chunks: Chunks) -> dict[str, Any]:
    """Run an answer to its end; return it."""
    async with aclosing(chunks):
        async for _, chunk in chunks:
            for _ in telling.take(chunk):
                pass
    return telling.script.whole()


class NotedTelling:
    """Frames the events of an answer, behind notes if a router asks for them.

    Args:
        telling: of the answer.
        stream: that a router asks for; None: there are no notes.
    """

    def __init__(self, telling: Telling, stream: NotedStream | None) -> None:
        self._telling = telling
        self._num_chars = None if stream is None else stream.choices[0].num_chars
        """Of the answer's text that the client has."""
        self._token_ids: list[int] = []
        """Since the last note."""

    def take(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk."""
        events = frames(self._telling.script, self._telling.take(chunk))
        if self._num_chars is None:
            return b"".join(events)
        self._token_ids += chunk.token_ids
        self._num_chars += len(chunk.text)
        if not events:
            return b""
        if chunk.finish_reason is not None:
            self._token_ids.append(ENDED)
        note = encode_note(self._token_ids, self._num_chars, num_events=len(events))
        self._token_ids = []
        return note + b"".join(events)


def frames(script: AnswerScript, events: Iterable[Event]) -> list[bytes]:
    """Return events as they are sent."""
    return [script.frame(event) for event in events]


async def tell_events(noted: NotedTelling, chunks: Chunks) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Yield events as they come, and whether they are the last."""
    async with aclosing(chunks):
        async for _, chunk in chunks:
            events = noted.take(chunk)
            if events:
                yield events, chunk.finish_reason is not None
