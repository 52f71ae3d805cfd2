"""Asks an engine what it is, once per incarnation of it, and rarely where it says nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import unquote

from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, EngineFactsError, decode_facts
from pagefleet_protocol.headers import INCARNATION, MODEL

from pagefleet_router.endpoints import EndpointTable, EngineView
from pagefleet_router.signals.http_get import ProbeAnswer, ProbeError, get

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
"""After no facts: an old engine has none, and a router need not pester it."""


class FactsAsker:
    """Keeps the facts of one engine in the table.

    Args:
        table: where they are kept.
        engine_id: whose.
        clock: monotonic.
    """

    def __init__(self, table: EndpointTable, engine_id: str, clock: Callable[[], float]) -> None:
        self._table = table
        self._engine_id = engine_id
        self._clock = clock
        self._asked_as: str | None = None
        self._ask_at = clock()

    async def after_probe(self, engine: EngineView, answer: ProbeAnswer, timeout_s: float) -> str | None:
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
            facts = await self._ask(engine.endpoint.url, timeout_s)
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

    async def _ask(self, url: str, timeout_s: float) -> EngineFacts | None:
        try:
            answer = await get(url, FACTS_PATH, timeout_s)
            if answer.status == 200:
                return decode_facts(answer.body)
            logger.debug("%s%s answers %d", url, FACTS_PATH, answer.status)
        except (ProbeError, EngineFactsError) as error:
            logger.debug("%s%s says nothing: %s", url, FACTS_PATH, error)
        return None

    def _is_expected(self, engine: EngineView, name: str) -> bool:
        model = engine.endpoint.model
        return model in (name, self._table.snapshot.aliases.get(name))
