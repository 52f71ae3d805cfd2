"""Which engines may get a request. What does not depend on the request is filtered when the snapshot is built."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from pagefleet_router.endpoints import EngineView, Snapshot
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
    return with_room(usable)


def with_room(engines: Sequence[EngineView]) -> Sequence[EngineView]:
    """Return the engines that have room, if there are any; else all."""
    return [engine for engine in engines if has_room(engine)] or engines


def has_room(engine: EngineView) -> bool:
    """Whether a new request would run at once, as far as we know."""
    return engine.facts is None or engine.num_requests < engine.facts.max_num_seqs
