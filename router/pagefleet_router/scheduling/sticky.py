"""Policies that keep to one criterion until it makes an engine crowded; then `auto` decides."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_router.endpoints import EngineView
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.cost import CROWD_RATIO, CROWD_SLACK
from pagefleet_router.scheduling.policy import Choice, Policy, Score
from pagefleet_router.scheduling.rendezvous import ranked


def uncrowded(engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines that have at most CROWD_RATIO x the mean + CROWD_SLACK requests: never none of them."""
    counts = [engine.num_requests for engine in engines]
    limit = CROWD_RATIO * sum(counts) / len(counts) + CROWD_SLACK
    return [engine for engine, count in zip(engines, counts, strict=True) if count <= limit]


class LongestPrefix:
    """The longest cached prefix, then the fewest requests. What nobody has goes where `auto` puts it."""

    uses_prefixes = True

    def __init__(self, knowledge: PrefixKnowledge, auto: Auto) -> None:
        self._knowledge = knowledge
        self._auto = auto

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine that has most of the prompt and is not crowded."""
        calm = uncrowded(engines)
        cached = self._knowledge.cached_tokens(calm, request)
        most = max(cached)
        if not most:
            return self._auto.choose(request, engines)
        best = [engine for engine, hit in zip(calm, cached, strict=True) if hit == most]
        return Choice(min(best, key=lambda engine: engine.num_requests), most)

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """See Policy."""
        return self._auto.explain(request, engines)

    def sent(self, request: RequestView, engine: EngineView) -> None:
        """Remember the prompt."""
        self._auto.sent(request, engine)

    def lost(self, engine_id: str) -> None:
        """Forget the engine's cache."""
        self._auto.lost(engine_id)


class SessionHash:
    """Consistent hashing of sessions with bounded loads (arXiv 1608.01350). Requests without a session: `otherwise`."""

    uses_prefixes = True

    def __init__(self, knowledge: PrefixKnowledge, otherwise: Policy) -> None:
        self._knowledge = knowledge
        self._otherwise = otherwise

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the first engine in the session's order that is not crowded."""
        if request.session is None:
            return self._otherwise.choose(request, engines)
        engine = ranked(request.session, uncrowded(engines))[0]
        return Choice(engine, self._knowledge.cached_tokens((engine,), request)[0])

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """See Policy."""
        return self._otherwise.explain(request, engines)

    def sent(self, request: RequestView, engine: EngineView) -> None:
        """Remember the prompt."""
        self._otherwise.sent(request, engine)

    def lost(self, engine_id: str) -> None:
        """Forget the engine's cache."""
        self._otherwise.lost(engine_id)
