"""Watches every engine: one task each, which asks /readyz and, if it answers, /metrics, and once what it is."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from pagefleet_protocol import headers
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, EngineFactsError, decode_facts
from pagefleet_protocol.engine_history import Counters, EngineHistory
from pagefleet_protocol.fault_book import FaultBook
from pagefleet_protocol.headers import INCARNATION, MODEL

from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.signals.figures import GeneratedTokens, parse_figures
from pagefleet_router.signals.http_get import ProbeAnswer, ProbeError, Prober
from pagefleet_router.telemetry.faults import NOT_A_NUMBER, NOT_READY, OUT_OF_MEMORY
from pagefleet_router.telemetry.log import tell_of_a_crash

logger = logging.getLogger(__name__)

_STALLED = b'"engine_stalled"'


@dataclass(frozen=True, slots=True)
class MonitorTiming:
    """Seconds."""

    period: float = 1.0
    """Between two looks at a ready engine; jittered, so that routers and engines do not march in step."""
    unready_period: float = 0.25
    """The same while it is not ready."""
    timeout: float = 2.0
    failures: int = 2
    """Probes without an answer in a row that make a ready engine unready; an answer that says so does at once."""
    stuck: float = 10.0
    """Without an answer to any probe; an engine that answers says itself, after as long, that it makes no progress."""


class Watched:
    """What is seen of one engine besides what the table has, for people who look."""

    __slots__ = ("answer", "answers", "counters", "history", "reason", "was_ready")

    def __init__(self) -> None:
        self.reason: str | None = "it was not asked yet"
        """Why it is not ready; None: the last probe found that it is."""
        self.answers = False
        """Whether it answered the last probe."""
        self.was_ready = False
        """Whether it ever was, in this router's time."""
        self.answer: ProbeAnswer | None = None
        """The last one that said that it is not ready."""
        self.history = EngineHistory()
        self.counters: Counters | None = None


class Monitor:
    """Keeps readiness and load in the table current.

    Args:
        table: what is kept current.
        on_healthy: called with the id of an engine that answered a probe well, so that ejections can end.
        timing: how often.
        faults: where what goes wrong is noted, and histories kept; None: nobody looks.
    """

    def __init__(
        self, table: EndpointTable, on_healthy: Callable[[str], None], timing: MonitorTiming | None = None,
        faults: FaultBook | None = None,
    ) -> None:  # fmt: skip
        self.generated = GeneratedTokens()
        self.watched: dict[str, Watched] = {}
        """By engine, what the table has no use for."""
        self._table = table
        self._on_healthy = on_healthy
        self._timing = timing or MonitorTiming()
        self._faults = faults
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hurry: dict[str, asyncio.Event] = {}
        table.subscribe(self._follow)

    def mark_refused(self, engine_id: str) -> None:
        """Take an engine that ends, or is not at its address, out of traffic now; its probes bring it back."""
        engine = self._table.engine(engine_id)
        is_news = engine is not None and not engine.endpoint.draining
        if self._table.set_ready(engine_id, False) and is_news:
            logger.warning("engine %s is not ready: it ends, or is not at its address", engine_id)
        if engine_id in self._hurry:
            self._hurry[engine_id].set()

    async def stop(self) -> None:
        """End all probes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _follow(self, left: set[str], came: set[str]) -> None:
        self.generated.forget(left)
        for engine_id in left:
            self._tasks.pop(engine_id).cancel()
            self.watched.pop(engine_id, None)
            del self._hurry[engine_id]
        for engine_id in came:
            self._hurry[engine_id] = asyncio.Event()
            self.watched[engine_id] = Watched()
            task = self._tasks[engine_id] = asyncio.get_running_loop().create_task(self._watch(engine_id))
            tell_of_a_crash(task, "an engine is not watched any more")

    async def _watch(self, engine_id: str) -> None:
        engine = self._table.engine(engine_id)
        if engine is None:
            return
        prober = Prober(engine.endpoint.url, self._timing.timeout)  # who is at another URL is another engine
        try:
            await self._watch_by(prober, engine_id)
        finally:
            prober.close()

    async def _watch_by(self, prober: Prober, engine_id: str) -> None:
        failures, said, answered_at, watched = 0, "", time.monotonic(), self.watched[engine_id]
        facts = FactsAsker(self._table, prober, time.monotonic)
        while (engine := self._table.engine(engine_id)) is not None:
            reason: str | None
            try:
                answer = await prober.get("/readyz")
                status, failures, answered_at = answer.status, 0, time.monotonic()
                stuck = status == 503 and _STALLED in answer.body
                reason = await self._objection(engine, answer, facts)
                watched.answer = None if reason is None else answer
            except ProbeError as error:
                status, reason = 0, str(error)
                watched.answer = None
                failures += 1
                stuck = time.monotonic() - answered_at >= self._timing.stuck
            ready = reason is None or (status == 0 and engine.ready and failures < self._timing.failures)
            self._table.set_ready(engine_id, ready, stuck)
            state = "ready" if ready else f"not ready: {reason}"
            if engine.endpoint.draining:  # as it should: what its probes say of that is no news
                state = "draining"
            watched.reason, watched.answers = reason, bool(status)
            watched.was_ready = watched.was_ready or ready
            if state != said:
                if said == "ready" and self._faults is not None and not engine.endpoint.draining:
                    self._faults.note(NOT_READY, engine_id, str(reason))
                logger.info("engine %s is %s", engine_id, state)
                said = state
            if reason is None:
                self._on_healthy(engine_id)
            if status:
                await self._poll_load(prober, engine_id)  # one that drains still works, and is not ready
            elif not ready:
                self._table.forget_load(engine_id)
            await self._pause(engine_id, ready)

    async def _objection(self, engine: EngineView, answer: ProbeAnswer, facts: FactsAsker) -> str | None:
        """Return why the engine is not ready, though it answers; None: it is."""
        if headers.ROLE in answer.headers:
            return "a router answers there, and it would get its own requests again"
        if answer.status != 200:
            return f"/readyz answers {answer.status}"
        return await facts.after_probe(engine, answer)

    async def _poll_load(self, prober: Prober, engine_id: str) -> None:
        try:
            answer = await prober.get("/metrics")
        except ProbeError:
            return  # the last figures stay; our own counts are current anyway
        if self._faults is not None and answer.status == 200:
            self._remember(self._faults, engine_id, answer.body)
        figures = parse_figures(answer.body) if answer.status == 200 else None
        if figures is None:
            return
        self._table.set_load(
            engine_id, figures.num_running, figures.num_waiting, figures.kv_usage, figures.num_generated,
            figures.transfer,
        )  # fmt: skip
        if figures.num_generated is not None:
            self.generated.observe(engine_id, figures.num_generated)

    def _remember(self, faults: FaultBook, engine_id: str, text: bytes) -> None:
        watched = self.watched[engine_id]
        counters, before = watched.history.note(text, time.monotonic()), watched.counters
        if counters is None:
            return
        watched.counters = counters
        if before is not None:
            for kind, now, then in (
                (NOT_A_NUMBER, counters.nan_requests, before.nan_requests),
                (OUT_OF_MEMORY, counters.out_of_memory_steps, before.out_of_memory_steps),
            ):
                if now > then:
                    faults.note(kind, engine_id, count=int(now - then))

    async def _pause(self, engine_id: str, ready: bool) -> None:
        period = self._timing.period if ready else self._timing.unready_period
        hurry = self._hurry.get(engine_id)
        if hurry is None:
            return
        hurry.clear()
        try:
            async with asyncio.timeout(period * random.uniform(0.8, 1.2)):  # noqa: S311 - jitter, no secret
                await hurry.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._timing.unready_period)


ASK_AGAIN_S = 30.0
"""After no facts: an old engine has none, and a router need not pester it."""


class FactsAsker:
    """Keeps the facts of one engine in the table.

    Args:
        table: where they are kept.
        prober: asks it.
        clock: monotonic.
    """

    def __init__(self, table: EndpointTable, prober: Prober, clock: Callable[[], float]) -> None:
        self._table = table
        self._prober = prober
        self._clock = clock
        self._asked_as: str | None = None
        self._ask_at = clock()

    async def after_probe(self, engine: EngineView, answer: ProbeAnswer) -> str | None:
        """Ask where the answer to a good probe says that something is new.

        Returns:
            Why the engine must get no traffic: it answers for another model. None: it may.
        """
        incarnation = answer.headers.get(INCARNATION)
        facts = engine.facts
        if facts is not None and incarnation is not None and facts.incarnation != incarnation:
            logger.info("engine %s began anew", engine.id)
            self._table.set_facts(engine.id, None)
            facts = None
        if facts is None and (incarnation != self._asked_as or self._clock() >= self._ask_at):
            self._asked_as = incarnation
            facts = await self._ask()
            if facts is not None and incarnation is not None and facts.incarnation != incarnation:
                facts = None  # it began anew in between, or is two behind one address
            if facts is None:
                self._ask_at = self._clock() + ASK_AGAIN_S
        model = unquote(answer.headers.get(MODEL, "")) or None
        for name in (model, None if facts is None else facts.model):
            if name is not None and not self._is_expected(engine, name):
                return f"answers for another model, {name[:80]!r}"
        self._table.set_facts(engine.id, facts)
        return None

    async def _ask(self) -> EngineFacts | None:
        try:
            answer = await self._prober.get(FACTS_PATH)
            if answer.status == 200:
                return decode_facts(answer.body)
            logger.debug("%s%s answers %d", self._prober.url, FACTS_PATH, answer.status)
        except (ProbeError, EngineFactsError) as error:
            logger.debug("%s%s says nothing: %s", self._prober.url, FACTS_PATH, error)
        return None

    def _is_expected(self, engine: EngineView, name: str) -> bool:
        model = engine.endpoint.model
        return model in (name, self._table.snapshot.aliases.get(name))
