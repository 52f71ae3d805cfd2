"""The way of one request's output from the client's reader to the caller."""

from __future__ import annotations

import asyncio

from pagefleet_engine.engine_core.output_text import Chunk, OutputText, merge_chunks
from pagefleet_engine.errors import EngineError


class OutputStream:
    """A mailbox for one reader. What is not taken yet becomes one chunk, so it is as large as the output at most.

    Args:
        text: turns the core's outputs into chunks.
    """

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.ended = False
        """True when the core has nothing more to say about the request."""
        self._chunks: list[Chunk] = []
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        """Deliver a chunk."""
        self._chunks.append(chunk)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, after what was delivered."""
        self._error = error
        self._news.set()

    async def get(self) -> Chunk:
        """Wait for the next chunk.

        Raises:
            EngineError: as given to `fail`.
        """
        await self._news.wait()
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            if self._error is None:
                self._news.clear()
            return merge_chunks(chunks)
        assert self._error is not None
        # A fresh one each time would lose the type's fields; the traceback of the last raise is not kept.
        raise self._error.with_traceback(None)
