"""The policies: how filter, score and pick are put together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_router.endpoints import EngineView
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.pickers import pick_lowest_then, pick_random_lowest
from pagefleet_router.scheduling.scorers import prefix_costs, request_counts

COLD_SLACK = 2.0
"""Where nobody has a prefix, costs this close (in pieces) count as equal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and how many pieces of the prompt it probably has cached."""

    engine: EngineView
    num_matched: int = 0


class Policy(Protocol):
    """Chooses among candidates (at least one), and is told what became of the choice."""

    uses_prefixes: bool
    """Whether requests must come with their pieces."""

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine for a request."""

    def sent(self, request: RequestView, engine: EngineView) -> None:
        """Note that the engine has taken the request."""

    def lost(self, engine_id: str) -> None:
        """Note that an engine's cache is gone: it left or began anew."""


class LeastLoad:
    """The fewest requests; ties at random, so that many routers do not all run to the same engine."""

    uses_prefixes = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine with the fewest requests."""
        return Choice(pick_random_lowest(engines, request_counts(engines), self._rng))

    def sent(self, request: RequestView, engine: EngineView) -> None:
        """Nothing to learn."""

    def lost(self, engine_id: str) -> None:
        """Nothing to forget."""


class PrefixAffinity:
    """The cheapest engine by uncached and queued work; a prefix nobody has goes where least was sent lately."""

    uses_prefixes = True

    def __init__(self, index: PrefixIndex, rng: random.Random, clock: Callable[[], float]) -> None:
        self._index = index
        self._rng = rng
        self._clock = clock

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine of the lowest cost."""
        pieces = request.pieces
        if not pieces:
            return Choice(pick_random_lowest(engines, request_counts(engines), self._rng))
        matched = [self._index.match(engine.id, pieces) for engine in engines]
        now = self._clock()
        costs = prefix_costs(engines, matched, len(pieces), now)
        if any(matched):
            engine = pick_random_lowest(engines, costs, self._rng)
        else:
            engine = pick_lowest_then(engines, costs, lambda one: one.tally.settle(now), COLD_SLACK)
        return Choice(engine, matched[engines.index(engine)])

    def sent(self, request: RequestView, engine: EngineView) -> None:
        """Remember the prompt."""
        if request.pieces:
            self._index.record(engine.id, request.pieces)

    def lost(self, engine_id: str) -> None:
        """Forget the engine's prompts."""
        self._index.forget(engine_id)
