"""The few engines of a large fleet that are worth a closer look."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import nlargest

from pagefleet_router.endpoints import EngineView

LARGE_FLEET = 32
"""Candidates up to which all are scored."""
_NUM_BEST = 4
_NUM_RANDOM = 2
"""Two at random and the better of them: the longest queue grows with log log n instead of log n (Mitzenmacher 2001)."""


def shortlist(
    engines: Sequence[EngineView], cached: Sequence[int], home: EngineView | None, rng: random.Random
) -> tuple[list[EngineView], list[int]]:
    """Return the engines with the longest cached prefixes, the session's own, and two at random; and what they have."""
    numbers = set(nlargest(_NUM_BEST, [n for n, tokens in enumerate(cached) if tokens], key=cached.__getitem__))
    if home is not None:
        numbers.add(engines.index(home))
    num_wanted = len(numbers) + _NUM_RANDOM
    while len(numbers) < num_wanted:
        numbers.add(int(rng.random() * len(engines)))
    chosen = sorted(numbers)
    return [engines[n] for n in chosen], [cached[n] for n in chosen]
