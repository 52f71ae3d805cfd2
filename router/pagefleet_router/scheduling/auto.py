"""The default policy: the engine that probably answers first, counting what that costs others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.cost import (
    PRESENT_SLACK,
    RECOMPUTE,
    SESSION_TOKENS,
    SLOW_START_S,
    STORED_SLACK,
    Bounds,
    bounds_of,
    crowding_seconds,
    predicted_seconds,
)
from pagefleet_router.scheduling.policy import Choice, Score
from pagefleet_router.scheduling.selection import LARGE_FLEET, home, pick_random_lowest, shortlist

COLD_SHARE = 0.25
"""A prompt of which nobody has this share is cold: its prefix, which others may share, gets its first place."""
COLD_RATIO = 2.0
"""Costs up to this many times the lowest count as equal for a cold prompt: the engine that has the most room and was
took in the fewest new tokens gets it. Where a prefix lives counts for longer than one answer (llm-d's no-hit-LRU has
the same aim); without it `bench/router_sim.py` loses 3 % of its hits at the edge of capacity, and half a percent beyond
it with requests counted instead of tokens: caches fill with tokens."""


class Auto:
    """Costs in seconds, see `cost`; a prefix nobody has goes where least was stored lately.

    Deterministic but for ties and the sample of large fleets, which `rng` decides.
    """

    uses_prefixes = True

    def __init__(self, knowledge: PrefixKnowledge, rng: random.Random, clock: Callable[[], float]) -> None:
        self._knowledge = knowledge
        self._rng = rng
        self._clock = clock

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine of the lowest cost."""
        if len(engines) == 1:
            return Choice(engines[0], self._knowledge.cached_tokens(engines, request)[0])
        now = self._clock()
        cached = self._knowledge.cached_tokens(engines, request)
        own = None if request.session is None else home(request.session, engines)
        if len(engines) > LARGE_FLEET:
            engines, cached = shortlist(engines, cached, own, self._rng)
        bounds = bounds_of(engines, now)
        costs = self._costs(request, engines, cached, own, bounds, now)
        if max(cached) >= COLD_SHARE * request.num_tokens:
            engine = pick_random_lowest(engines, costs, self._rng)
        else:
            engine = self._pick_cold(engines, costs, bounds)
        return Choice(engine, cached[engines.index(engine)])

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """See Policy. All engines of a large fleet are told of, though `choose` looks at few."""
        now = self._clock()
        cached = self._knowledge.cached_tokens(engines, request)
        own = None if request.session is None else home(request.session, engines)
        bounds = bounds_of(engines, now)
        costs = self._costs(request, engines, cached, own, bounds, now)
        return tuple(
            Score(engine.id, cost, hit, engine.tally.queued(now), reason_of(engine, engine is own, bounds, now))
            for engine, cost, hit in zip(engines, costs, cached, strict=True)
        )

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Remember the prompt."""
        self._knowledge.sent(engine, request, rank)

    def lost(self, engine_id: str) -> None:
        """Forget the engine's cache."""
        self._knowledge.lost(engine_id)

    def _pick_cold(self, engines: Sequence[EngineView], costs: Sequence[float], bounds: Bounds) -> EngineView:
        """Return the engine with the least KV in use and the smallest shares of requests and of new tokens.

        Shares, because the one tells what is there and the other what came lately, which is many times as much: it
        would hide that an engine works off what it has more slowly than the others.
        """
        present, stored = bounds.all_requests, len(engines) * bounds.stored
        limit, least, found = COLD_RATIO * min(costs), math.inf, engines[0]
        for engine, cost in zip(engines, costs, strict=True):
            if cost <= limit:
                share = (engine.num_requests + PRESENT_SLACK) / present + engine.tally.stored / stored
                full = engine.kv_usage + share
                if full < least:
                    least, found = full, engine
        return found

    def _costs(
        self, request: RequestView, engines: Sequence[EngineView], cached: Sequence[int], own: EngineView | None,
        bounds: Bounds, now: float,
    ) -> list[float]:  # fmt: skip
        tokens = request.num_tokens
        costs = []
        for engine, hit in zip(engines, cached, strict=True):
            share = (engine.tally.stored + STORED_SLACK) / bounds.stored
            cost = predicted_seconds(engine, tokens, hit, now, share)
            if engine.tally.recent > bounds.recent or engine.num_requests > bounds.requests:
                cost += crowding_seconds(engine, tokens, bounds)
            if own is not None and engine is not own:
                cost += RECOMPUTE * SESSION_TOKENS / engine.rates.prefill.value
            costs.append(cost)
        return costs


def reason_of(engine: EngineView, is_home: bool, bounds: Bounds, now: float) -> str:
    """Return what sets an engine apart, in words."""
    reasons = []
    if engine.num_requests > bounds.requests:
        reasons.append("crowded")
    elif engine.tally.recent > bounds.recent:
        reasons.append("had more than its share")
    if engine.facts is not None and engine.num_requests >= engine.facts.max_num_seqs:
        reasons.append("full")
    if now - engine.usable_since < SLOW_START_S:
        reasons.append("new")
    if is_home:
        reasons.append("session")
    return ", ".join(reasons)
