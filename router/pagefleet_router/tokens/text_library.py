"""The text models of the served models, asked of the engines once and kept by the digest of their data.

What an engine answers is data: it must have the digest that the engine's facts name, and is read in a thread. Reading
a tokenizer of 100,000 tokens keeps the interpreter for some tenths of a second, once per model.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from pagefleet_protocol.engine_facts import (
    MAX_TEXT_BYTES,
    TEXT_PATH,
    EngineFacts,
    EngineFactsError,
    decode_text,
    text_digest,
)
from pagefleet_text.errors import TextError
from pagefleet_text.text_model import TextModel

from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.signals.http_get import ProbeAnswer, ProbeError, Prober
from pagefleet_router.tokens.segmented_tokenizer import SegmentCache, SegmentedTokenizer

logger = logging.getLogger(__name__)

MAX_MODELS = 8
"""Beside those that engines have now: a model whose engines restart need not be loaded again."""
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
GET_TIMEOUT_S = 30.0
AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class ServedText:
    """A text model, and whether its prompts depend on when they are made."""

    model: TextModel
    uses_clock: bool


class TextLibrary:
    """Keeps the text models that the engines of a table use.

    Args:
        table: the engines.
        pool: where data is read.
    """

    def __init__(self, table: EndpointTable, pool: Executor) -> None:
        self._table = table
        self._pool = pool
        self.num_loaded = 0
        """Grows with every model."""
        self._cache = SegmentCache(MAX_SEGMENT_BYTES)
        self._texts: dict[str, ServedText] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        table.subscribe_to_facts(self._facts_changed)

    def text(self, digest: str) -> ServedText | None:
        """Return a model, None where it is not loaded."""
        return self._texts.get(digest)

    @property
    def num_segments_reused(self) -> int:
        """How often the tokens of a part of a prompt were remembered."""
        return self._cache.num_hits

    async def stop(self) -> None:
        """Load nothing more."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _facts_changed(self, engine: EngineView, before: EngineFacts | None) -> None:
        digest = None if engine.facts is None else engine.facts.text_digest
        if digest is None or digest in self._texts or digest in self._loading:
            return
        task = asyncio.get_running_loop().create_task(self._load(digest))
        self._loading[digest] = task
        task.add_done_callback(lambda _: self._loading.pop(digest, None))

    async def _load(self, digest: str) -> None:
        turn = 0
        while urls := self._urls_of(digest):
            url = urls[turn % len(urls)]
            try:
                answer = await _ask(url)
                if answer.status != 200:
                    raise ProbeError(f"it answers {answer.status}")
                read = partial(_read, answer.body, digest, self._cache)
                self._keep(digest, await asyncio.get_running_loop().run_in_executor(self._pool, read))
            except (ProbeError, EngineFactsError, TextError) as error:
                logger.warning("no tokenizer from %s%s: %s", url, TEXT_PATH, error)
                await asyncio.sleep(AGAIN_S)
                turn += 1
            else:
                logger.info("the tokenizer of %s is loaded", url)
                return

    def _urls_of(self, digest: str) -> list[str]:
        engines = self._table.snapshot.engines
        return [one.endpoint.url for one in engines if one.facts is not None and one.facts.text_digest == digest]

    def _keep(self, digest: str, text: ServedText) -> None:
        unused = [name for name in self._texts if not self._urls_of(name)]
        for name in unused[: max(0, len(unused) - MAX_MODELS + 1)]:
            del self._texts[name]
        self._texts[digest] = text
        self.num_loaded += 1


async def _ask(url: str) -> ProbeAnswer:
    prober = Prober(url, GET_TIMEOUT_S, MAX_TEXT_BYTES)
    try:
        return await prober.get(TEXT_PATH)
    finally:
        prober.close()


def _read(data: bytes, digest: str, cache: SegmentCache) -> ServedText:
    if text_digest(data) != digest:
        raise EngineFactsError("the data is not what the engine's facts say")
    text = decode_text(data)
    template = text.chat_template or ""
    make = partial(SegmentedTokenizer, template=template, cache=cache, name=digest)
    return ServedText(TextModel.of_data(text, make), "strftime_now" in template)
