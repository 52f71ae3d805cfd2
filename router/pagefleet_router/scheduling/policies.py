"""The policies by their names: those that do not look at prompts, and those that keep to one criterion."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pagefleet_router.config import PolicyName
from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.cost import CROWD_RATIO, CROWD_SLACK, predicted_seconds
from pagefleet_router.scheduling.policy import Choice, Policy, Score
from pagefleet_router.scheduling.selection import pick_random_lowest, ranked


def make_policy(
    name: PolicyName, knowledge: PrefixKnowledge, clock: Callable[[], float], rng: random.Random
) -> Policy:  # fmt: skip
    """Return a policy.

    Args:
        name: which one.
        knowledge: of the engines' caches.
        clock: that of the table.
        rng: for ties and samples.
    """
    if name == "least-load":
        return LeastLoad(rng, clock)
    if name == "round-robin":
        return RoundRobin(clock)
    auto = Auto(knowledge, rng, clock)
    if name == "prefix":
        return LongestPrefix(knowledge, auto)
    return SessionHash(knowledge, auto) if name == "session" else auto


class LeastLoad:
    """The fewest requests; ties at random, so that many routers do not all run to the same engine."""

    uses_prefixes = False

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._rng = rng
        self._clock = clock

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine with the fewest requests."""
        return Choice(pick_random_lowest(engines, [engine.num_requests for engine in engines], self._rng))

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """See Policy."""
        return blind_scores(request, engines, self._clock())

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Nothing to learn."""

    def lost(self, engine_id: str) -> None:
        """Nothing to forget."""


class RoundRobin:
    """The engine whose turn is the longest ago."""

    uses_prefixes = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn = 0
        self._last: dict[str, int] = {}

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine that was chosen the longest ago.

        That is its turn: of two engines for one request only one is `sent` it before it answers.
        """
        last = self._last
        engine = min(engines, key=lambda engine: last.get(engine.id, 0))
        self._turn += 1
        last[engine.id] = self._turn
        return Choice(engine)

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """See Policy."""
        return blind_scores(request, engines, self._clock())

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Nothing to learn."""

    def lost(self, engine_id: str) -> None:
        """Forget its turns."""
        self._last.pop(engine_id, None)


def blind_scores(request: RequestView, engines: Sequence[EngineView], now: float) -> tuple[Score, ...]:
    """Return what engines would cost if none had anything cached."""
    return tuple(
        Score(
            engine.id,
            predicted_seconds(engine, request.num_tokens, 0, now),
            0,
            engine.tally.queued(now),
            f"{engine.num_requests:g} requests",
        )
        for engine in engines
    )


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

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Remember the prompt."""
        self._auto.sent(request, engine, rank)

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

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Remember the prompt."""
        self._otherwise.sent(request, engine, rank)

    def lost(self, engine_id: str) -> None:
        """Forget the engine's cache."""
        self._otherwise.lost(engine_id)
