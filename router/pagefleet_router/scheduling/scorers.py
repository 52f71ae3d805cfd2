"""Costs of giving a request to each engine; the lowest wins. Units: prompt pieces of 512 bytes."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_router.endpoints import EngineView

QUEUE_WEIGHT = 0.1
"""What a piece costs that waits before ours, beside one that has to be computed for us. Below one, because leaving the
cache costs every later request of the same prefix too."""
REQUEST_WEIGHT = 0.25
"""What another running request costs, in pieces."""
CROWD_RATIO = 1.25
CROWD_SLACK = 4.0
"""An engine is crowded with more than CROWD_RATIO x the mean + CROWD_SLACK requests. Then no cache makes up for it:
consistent hashing with bounded loads has the same rule (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350)."""
SHARE_RATIO = 1.15
SHARE_SLACK = 16.0
"""The same for what an engine was sent lately: few requests at a time can pin a fleet's traffic to one engine too.
What leaves takes its prefix along, so that from then on two engines share it."""


def request_counts(engines: Sequence[EngineView]) -> list[float]:
    """Return how many requests each engine has: the whole cost under `least-load`."""
    return [engine.num_requests for engine in engines]


def bound(values: Sequence[float], ratio: float, slack: float) -> float:
    """Return the most that one engine may have beside the others."""
    return ratio * sum(values) / len(values) + slack


def prefix_costs(engines: Sequence[EngineView], matched: Sequence[int], num_pieces: int, now: float) -> list[float]:
    """Return, for each engine, the work this request adds plus a part of the work before it.

    Args:
        engines: the candidates.
        matched: how many leading pieces each one has probably cached.
        num_pieces: pieces of the prompt.
        now: on the clock of the tallies.
    """
    counts = request_counts(engines)
    recents = [engine.tally.settle(now) for engine in engines]
    crowd = bound(counts, CROWD_RATIO, CROWD_SLACK)
    share = bound(recents, SHARE_RATIO, SHARE_SLACK)
    penalty = num_pieces + 1.0
    costs = []
    for engine, hit, count, recent in zip(engines, matched, counts, recents, strict=True):
        cost = num_pieces - hit + QUEUE_WEIGHT * engine.tally.num_pieces + REQUEST_WEIGHT * count
        if count > crowd:
            cost += penalty + (count - crowd)
        elif recent > share:
            cost += penalty
        costs.append(cost)
    return costs
