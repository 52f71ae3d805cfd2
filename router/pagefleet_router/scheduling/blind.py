"""Policies that do not look at prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pagefleet_router.endpoints import EngineView
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.cost import predicted_seconds
from pagefleet_router.scheduling.pickers import pick_random_lowest
from pagefleet_router.scheduling.policy import Choice, Score


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

    def sent(self, request: RequestView, engine: EngineView) -> None:
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

    def sent(self, request: RequestView, engine: EngineView) -> None:
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
