"""Which engines may get a request. What does not depend on the request is filtered when the snapshot is built."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from pagefleet_router.endpoints import EngineView, Snapshot
from pagefleet_router.request_view import RequestView


def candidates(snapshot: Snapshot, request: RequestView, tried: Collection[str]) -> tuple[EngineView, ...]:
    """Return the usable engines of the request's model that were not tried yet."""
    if request.model is None:
        usable = tuple(chain.from_iterable(snapshot.usable.values()))
    else:
        usable = snapshot.usable.get(request.model, ())
    if not tried:
        return usable
    return tuple(engine for engine in usable if engine.id not in tried)
