"""Fewer engines out of many: those that may get a request, the few worth a closer look, a session's order, the one."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Sequence
from heapq import nlargest
from itertools import chain

from pagefleet_router.engines.endpoints import EngineView, Snapshot
from pagefleet_router.request_view import RequestView


def candidates(snapshot: Snapshot, request: RequestView, tried: Collection[str]) -> Sequence[EngineView]:
    """Return the usable engines of the request's model that were not tried yet: those with room if there are any."""
    usable: Sequence[EngineView]
    if request.model is None:
        usable = tuple(chain.from_iterable(snapshot.usable.values()))
    else:
        usable = snapshot.usable.get(request.model, ())
    if tried:
        usable = tuple(engine for engine in usable if engine.id not in tried)
    if snapshot.trials and request.model is not None and not request.store:
        trial = snapshot.trials.get(request.model)
        if trial is not None:
            usable = of_its_side(usable, request.draw < trial.percent and not tried)
    if request.store:
        usable = tuple(one for one in usable if one.facts is not None and one.facts.response_store == request.store)
    return with_room(usable)


def of_its_side(engines: Sequence[EngineView], on_trial: bool) -> Sequence[EngineView]:
    """Return the engines of the revision that is tried out, or the others; where there are none, all.

    What is tried out gets no request that would have to wait there, and none that has failed elsewhere: it may fail.
    """
    new = [engine for engine in engines if engine.endpoint.on_trial is not None]
    if on_trial and any(has_room(engine) for engine in new):
        return new
    return [engine for engine in engines if engine.endpoint.on_trial is None] or engines


def with_room(engines: Sequence[EngineView]) -> Sequence[EngineView]:
    """Return the engines that have room, if there are any; else all."""
    return [engine for engine in engines if has_room(engine)] or engines


def has_room(engine: EngineView) -> bool:
    """Whether a new request would run at once, as far as we know."""
    return engine.facts is None or engine.num_requests < engine.facts.max_num_seqs


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


# Which engine a session belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).
# Every router comes to the same answer without talking to others, and an engine that comes or goes moves only its
# share.
_MASK = 2**64 - 1


def weight(session: int, engine_id: str) -> int:
    """Return a number that looks random, and is the same in every process."""
    mixed = (session ^ zlib.crc32(engine_id.encode()) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK  # the finalizer of splitmix64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 31


def ranked(session: int, engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines in the order in which a session tries them."""
    return sorted(engines, key=lambda engine: weight(session, engine.id), reverse=True)


def home(session: int, engines: Sequence[EngineView]) -> EngineView:
    """Return the first of `ranked`."""
    return max(engines, key=lambda engine: weight(session, engine.id))


def pick_random_lowest(engines: Sequence[EngineView], costs: Sequence[float], rng: random.Random) -> EngineView:
    """Return an engine of the lowest cost, any of them if there are several."""
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return engines[costs.index(lowest)]
    best = [engine for engine, cost in zip(engines, costs, strict=True) if cost == lowest]
    return best[int(rng.random() * len(best))]
