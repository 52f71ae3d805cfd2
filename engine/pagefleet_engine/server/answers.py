"""What becomes of chunks: choices of a whole answer, or server-sent events; and the count of tokens for either.

What is the same in every event of a stream is encoded once. An event costs a few microseconds: bytes are joined, and
only the new text goes through the JSON encoder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from pagefleet_protocol.openai_common import StreamOptions, Usage, usage

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.engine_core.messages import WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk


class Thoughts(Protocol):
    """What has read the answer so far."""

    @property
    def num_thought_tokens(self) -> int:
        """Tokens that its choices have thought with."""
        ...


class TokenCounts:
    """Usage so far. A prompt counts once, whatever `n`; cached tokens are those of its first choice.

    Output that a choice goes on from counts as its own.
    """

    def __init__(self, asked: Generation, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._prompt_tokens = asked.num_prompt_tokens
        self._n = asked.sampling.n
        self._completion_tokens = asked.num_resumed_tokens
        self._cached_tokens = 0

    def add(self, index: int, chunk: Chunk) -> None:
        """Count one chunk of choice `index`."""
        self._completion_tokens += len(chunk.token_ids)
        if chunk.num_cached_tokens and index % self._n == 0:
            self._cached_tokens += chunk.num_cached_tokens

    def usage(self) -> Usage:
        """Return the counts."""
        thought = self._thoughts.num_thought_tokens
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens, thought)


@dataclass(slots=True)
class Collected:
    """One choice, complete once `finish_reason` is set."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[WireLogprobs] = field(default_factory=list)
    prompt_logprobs: list[WireLogprobs] | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self.text.append(chunk.text)
        self.token_ids += chunk.token_ids
        if chunk.logprobs:
            self.logprobs += chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *chunk.prompt_logprobs]
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


class ChoiceFormat(Protocol):
    """Writes the JSON of one choice of one chunk: what is inside `"choices": [...]`."""

    def opening(self, index: int, chunk: Chunk) -> bytes | None:
        """Return the first chunk's choice, if this route sends one before any text."""
        ...

    def beside_opening(self, index: int, chunk: Chunk) -> bytes:
        """Return what the first event of a choice has beside choices: nothing, or a comma and fields."""
        ...

    def content(self, index: int, chunk: Chunk) -> bytes | None:
        """Return the choice with the chunk's text, None if that shows nothing; the last may also carry the end."""
        ...

    def ending(self, index: int, chunk: Chunk) -> bytes | None:
        """Return a choice of its own that carries the finish reason, if this route sends one; after `content`."""
        ...


class Events(Protocol):
    """What a stream consists of."""

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Return the events that a chunk makes."""
        ...

    def usage_event(self) -> bytes:
        """Return the last event, empty if there is none."""
        ...


class EventWriter:
    """Events of one stream."""

    def __init__(
        self, object_name: str, head: AnswerHead, choice: ChoiceFormat, counts: TokenCounts, options: StreamOptions
    ) -> None:
        fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
        self._start = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
        self._choice = choice
        self._counts = counts
        self._continuous = options.include_usage and options.continuous_usage_stats
        self._include = options.include_usage
        self._fixed_tail = b'],"usage":null' + _END if options.include_usage else b"]" + _END
        self._opened: set[int] = set()

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Return the events that a chunk makes: one, or none, or up to three at the ends of a choice."""
        opening, content, ending = self.parts(index, chunk)
        if content is not None and opening is None and ending is None:  # nearly always
            return content
        return b"".join([part for part in (opening, content, ending) if part is not None])

    def parts(self, index: int, chunk: Chunk) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Count a chunk; return the events that open a choice, have its content and end it, as far as it makes them."""
        self._counts.add(index, chunk)
        opening = ending = None
        if index not in self._opened:
            self._opened.add(index)
            opening = self._choice.opening(index, chunk)
        content = self._choice.content(index, chunk)
        tail = self._tail()  # now thoughts are counted, too
        if opening is not None:
            opening = self._start + opening + b"]" + self._choice.beside_opening(index, chunk) + tail[1:]
        if content is not None:
            content = self._start + content + tail
        if chunk.finish_reason is not None:
            ending = self._choice.ending(index, chunk)
            if ending is not None:
                ending = self._start + ending + tail
        return opening, content, ending

    def usage_event(self) -> bytes:
        """Return the last event, without choices, if the client asked for it."""
        return self._start + self._usage_tail() if self._include else b""

    def _tail(self) -> bytes:
        return self._usage_tail() if self._continuous else self._fixed_tail

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + msgspec.json.encode(self._counts.usage()) + _END


async def event_stream(chunks: Chunks, writer: Events) -> AsyncGenerator[bytes, None]:
    """Yield framed events until every choice has ended, then the usage."""
    async with aclosing(chunks):
        async for index, chunk in chunks:
            if events := writer.events(index, chunk):
                yield events
    if usage := writer.usage_event():
        yield usage


def prefixes(before: bytes, after: bytes, num_choices: int) -> list[bytes]:
    """Return `before` + index + `after` for each choice."""
    return [before + str(index).encode() + after for index in range(num_choices)]
