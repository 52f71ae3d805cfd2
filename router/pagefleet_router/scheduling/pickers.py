"""The end of a choice: one engine out of the scored ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pagefleet_router.endpoints import EngineView


def pick_random_lowest(engines: Sequence[EngineView], costs: Sequence[float], rng: random.Random) -> EngineView:
    """Return an engine of the lowest cost, any of them if there are several."""
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return engines[costs.index(lowest)]
    best = [engine for engine, cost in zip(engines, costs, strict=True) if cost == lowest]
    return best[int(rng.random() * len(best))]


def pick_lowest_then(
    engines: Sequence[EngineView], costs: Sequence[float], tie_break: Callable[[EngineView], float], slack: float
) -> EngineView:
    """Return, of the engines within `slack` of the lowest cost, the one with the smallest `tie_break`."""
    limit = min(costs) + slack
    best = [engine for engine, cost in zip(engines, costs, strict=True) if cost <= limit]
    return best[0] if len(best) == 1 else min(best, key=tie_break)
