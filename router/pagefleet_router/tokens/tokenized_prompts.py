"""Tokenizes long prompts in threads, for routing by exact blocks and so that the engine need not do it again.

A prompt that takes too long, or comes when too many wait, goes on as it is: its prefix is guessed from the text, and
the engine tokenizes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.engine_facts import EngineFacts
from prometheus_client.core import CounterMetricFamily, Metric

from pagefleet_router.engines.endpoints import EndpointTable, EngineView, Snapshot
from pagefleet_router.request_view import RequestView
from pagefleet_router.tokens.prompt_work import ROUTES, PromptWork
from pagefleet_router.tokens.text_library import ServedText, TextLibrary

logger = logging.getLogger(__name__)

THREADS = 2
MIN_BODY_BYTES = 2048
"""A shorter prompt is some hundred tokens, which an engine computes in less time than it takes to ask for a thread."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""A longer body is decoded for tens of milliseconds without a pause."""
MAX_WAITING = 64
LIMIT_S = 1.0

Then = Callable[[RequestView], None]
_Plan = tuple[EngineFacts, ServedText]


class TokenizedPrompts:
    """Implements `PromptReader`.

    Args:
        table: the engines.
    """

    def __init__(self, table: EndpointTable) -> None:
        self.num_read = 0
        """Prompts that went on with tokens or blocks."""
        self.num_late = 0
        """Prompts that went on without their tokens."""
        self._table = table
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._library = TextLibrary(table, self._pool)
        self._num_waiting = 0
        self._stopped = False
        self._planned_for: tuple[Snapshot, int] | None = None
        self._plans: dict[str, _Plan | None] = {}

    def read(self, route: str, body: bytes, view: RequestView, then: Then) -> RequestView | None:
        """See PromptReader."""
        if not MIN_BODY_BYTES <= len(body) <= MAX_BODY_BYTES or route not in ROUTES or view.model is None:
            return view
        plan = self._plan(view.model)
        if plan is None:
            return view
        if self._stopped or self._num_waiting >= MAX_WAITING:
            self.num_late += 1
            return view
        _Reading(self, PromptWork(route, body, view, *plan), then).start(self._pool)
        return None

    async def stop(self) -> None:
        """See PromptReader. Whoever still comes, as those who waited when others are cut, goes on without tokens."""
        self._stopped = True
        await self._library.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def collect(self) -> Iterator[Metric]:
        """See PromptReader."""
        for name, text, value in (
            (names.ROUTER_PROMPTS_TOKENIZED, "Prompts sent on with their tokens or blocks.", self.num_read),
            (names.ROUTER_PROMPTS_LATE, "Prompts sent on without: too slow, or too many.", self.num_late),
            (
                names.ROUTER_SEGMENTS_REUSED,
                "Parts of prompts whose tokens were remembered.",
                self._library.num_segments_reused,
            ),
        ):
            yield CounterMetricFamily(name.removesuffix("_total"), text, value=value)

    def began(self) -> None:
        """Count a prompt in a thread, or waiting for one."""
        self._num_waiting += 1

    def ended(self) -> None:
        """Count its end."""
        self._num_waiting -= 1

    def _plan(self, model: str) -> _Plan | None:
        """Return how a model's prompts are read; worked out again when the engines or the loaded texts change."""
        snapshot, num_loaded = self._table.snapshot, self._library.num_loaded
        before = self._planned_for
        if before is None or before[0] is not snapshot or before[1] != num_loaded:
            self._planned_for, self._plans = (snapshot, num_loaded), {}
        if model not in self._plans:
            self._plans[model] = self._make_plan(snapshot.usable.get(model, ()))
        return self._plans[model]

    def _make_plan(self, engines: tuple[EngineView, ...]) -> _Plan | None:
        """Take the facts that most engines share, of those that publish events and whose text is here.

        Without events nobody could use the blocks, and the work would only move from many engines to one router.
        """
        votes: dict[tuple[str, int, str], list[_Plan]] = {}
        for facts in (engine.facts for engine in engines):
            if facts is None or facts.text_digest is None or all(one.kv_events_port is None for one in facts.caches):
                continue
            text = self._library.text(facts.text_digest)
            if text is not None:
                votes.setdefault((facts.scope, facts.block_size, facts.text_digest), []).append((facts, text))
        return max(votes.values(), key=len)[0] if votes else None


class _Reading:
    """One prompt under way: `then` is called once, by whichever comes first of the result and the time limit."""

    def __init__(self, prompts: TokenizedPrompts, work: PromptWork, then: Then) -> None:
        self._prompts = prompts
        self._work = work
        self._then: Then | None = then
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.TimerHandle | None = None

    def start(self, pool: ThreadPoolExecutor) -> None:
        self._prompts.began()
        self._limit = self._loop.call_later(LIMIT_S, self._late)
        pool.submit(self._work.do).add_done_callback(self._done)

    def _done(self, future: Future[RequestView]) -> None:
        """Tell the loop; called in a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._arrived, future)

    def _arrived(self, future: Future[RequestView]) -> None:
        self._prompts.ended()
        if self._limit is not None:
            self._limit.cancel()
        view = self._work.view
        if not future.cancelled():
            if (error := future.exception()) is None:
                view = future.result()
            else:
                logger.error("a prompt could not be tokenized: the engine will", exc_info=error)
        if self._then is not None:
            self._prompts.num_read += bool(view.token_ids or view.blocks)
        self._go_on(view)

    def _late(self) -> None:
        self._prompts.num_late += 1
        self._go_on(self._work.view)

    def _go_on(self, view: RequestView) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(view)
