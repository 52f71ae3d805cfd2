"""What one HTTP request asks of the engine, and the way of its outputs from the client's reader to who asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_protocol.kv_handoff import KvTransfer
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.client.balance import Seat
from pagefleet_engine.engine_core.admission import fan_out
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.engine_core.output_text import Chunk, OutputSoFar, OutputText, merge_chunks
from pagefleet_engine.errors import EngineError, InvalidRequest

Chunks = AsyncGenerator[tuple[int, Chunk], None]
"""Choice index and chunk, as they come."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompts that were checked, with `sampling.n` choices each: choice index = prompt's index times `n` + number."""

    request_id: str
    prompts: Sequence[list[int]]
    sampling: SamplingParams
    priority: int = 0
    """Smaller runs earlier, under the priority policy."""
    cache_salt: str | None = None
    resumed: Sequence[OutputSoFar | None] = ()
    """Another engine's output, that each choice goes on from; empty: none does."""
    transfer: KvTransfer | None = None
    """The leg that this is of a transfer of the one prompt's K/V."""
    beams: BeamSearchParams | None = None
    """The choices are the best beams of a search, not drawn."""

    @property
    def num_choices(self) -> int:
        """Prompts times `n`."""
        return len(self.prompts) * self.sampling.n

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts; each counts once, whatever `n`."""
        return sum(map(len, self.prompts))

    @property
    def num_resumed_tokens(self) -> int:
        """Output that it goes on from."""
        return sum(len(output.token_ids) for output in self.resumed if output is not None)

    def messages(
        self, ids: Iterator[str], eos_token_ids: tuple[int, ...]
    ) -> Iterator[tuple[AddRequest, int, OutputSoFar | None]]:
        """Yield what to send, with the first choice that it is for: prompts, or choices that resume others' output.

        Args:
            ids: a new one for each message.
            eos_token_ids: of the model.
        """
        n = self.sampling.n

        def message(prompt: list[int], sampling: SamplingParams, resumed: Sequence[int] = ()) -> AddRequest:
            more = (self.priority, self.cache_salt, None, list(resumed), self.transfer)
            return AddRequest(next(ids), prompt, sampling, eos_token_ids, *more)

        if not self.resumed:
            for number, prompt in enumerate(self.prompts):
                yield message(prompt, self.sampling), number * n, None
            return
        outputs = fan_out(self.sampling) * len(self.prompts)
        for index, (so_far, sampling) in enumerate(zip(self.resumed, outputs, strict=True)):
            yield message(self.prompts[index // n], sampling, so_far.token_ids if so_far else ()), index, so_far


class Mailbox:
    """Chunks of all choices of one request, for one reader.

    What is not taken yet becomes one chunk of its choice, so it holds no more than the outputs themselves.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[Chunk]] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, index: int, chunk: Chunk) -> None:
        """Deliver a chunk."""
        self._chunks.setdefault(index, []).append(chunk)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End everything with an error, after what was delivered; the first counts."""
        self._error = self._error or error
        self._news.set()

    async def get(self) -> tuple[int, Chunk]:
        """Wait for the next chunk of any choice.

        Raises:
            EngineError, InvalidRequest: as given to `fail`.
        """
        await self._news.wait()
        if self._chunks:
            index = next(iter(self._chunks))  # the one that waits longest
            chunks = self._chunks.pop(index)
            if not self._chunks and self._error is None:
                self._news.clear()
            return index, merge_chunks(chunks)
        assert self._error is not None
        # A fresh one each time would lose the type's fields; the traceback of the last raise is not kept.
        raise self._error.with_traceback(None)


@dataclass(slots=True)
class OutputStream:
    """One choice on its way."""

    mailbox: Mailbox
    index: int
    text: OutputText
    seat: Seat
    """That its prompt has at a core."""

    def fail(self, error: EngineError | InvalidRequest) -> None:
        """End the request that the choice is of."""
        self.mailbox.fail(error)
