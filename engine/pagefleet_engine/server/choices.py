"""Collects the chunks of each choice of a whole answer, and counts tokens for the usage of either kind."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from pagefleet_protocol.openai_common import Usage, usage

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.engine_core.messages import WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk


class TokenCounts:
    """Usage so far. A prompt counts once, whatever `n`; cached tokens are those of its first choice.

    Output that a choice goes on from counts as its own.
    """

    def __init__(self, asked: Generation) -> None:
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
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


@dataclass(slots=True)
class Collected:
    """One choice, complete once `finish_reason` is set."""

    text: list[str] = field(default_factory=list)
    logprobs: list[WireLogprobs] = field(default_factory=list)
    prompt_logprobs: list[WireLogprobs] | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self.text.append(chunk.text)
        if chunk.logprobs:
            self.logprobs += chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *chunk.prompt_logprobs]
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


async def collect(chunks: Chunks, asked: Generation) -> tuple[list[Collected], Usage]:
    """Run choices to their end; return them by index, with the usage."""
    choices = [Collected() for _ in range(asked.num_choices)]
    counts = TokenCounts(asked)
    async with aclosing(chunks):
        async for index, chunk in chunks:
            choices[index].add(chunk)
            counts.add(index, chunk)
    return choices, counts.usage()
