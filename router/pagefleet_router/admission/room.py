"""How many requests a model's engines have room for: what they run at once, and some more so that none ever idles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_protocol.endpoints import OnTrial

from pagefleet_router.engines.endpoints import EngineView, Snapshot

UNKNOWN_CAPACITY = 4096
"""Of an engine that does not say."""
BUFFER_SHARE, MIN_BUFFER = 0.25, 8


@dataclass(frozen=True, slots=True)
class Room:
    """Requests that fit into the usable engines of one model."""

    num_engines: int = 0
    capacity: int = 0
    num_foreign: int = 0
    """Requests that they had from others when they were last asked."""

    def share(self, num_processes: int) -> int:
        """Return how many requests of its own a process may have there.

        What others have counts, but never so much that less than half of an even share is left: figures of others are
        as old as the last poll.
        """
        return max(self.capacity - self.num_foreign, math.ceil(self.capacity / (2 * num_processes)))


class Engines(Protocol):
    """Tells of rooms."""

    def room(self, model: str) -> Room:
        """Return the room of one model as it is now."""


class FleetRooms:
    """Reads rooms from snapshots."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def room(self, model: str) -> Room:
        """See Engines."""
        snapshot = self._snapshot()
        usable = snapshot.usable.get(model, ())
        foreign = sum(engine.load.num_foreign for engine in usable if engine.load is not None)
        trial = snapshot.trials.get(model)
        capacity = sum(map(capacity_of, usable)) if trial is None else _capacity_of_both(usable, trial)
        return Room(len(usable), capacity, int(foreign))


def _capacity_of_both(engines: Sequence[EngineView], trial: OnTrial) -> int:
    """Return the requests of two revisions: where one is full, the gate must not fill the other beyond its share."""
    new = sum(capacity_of(engine) for engine in engines if engine.endpoint.on_trial is not None)
    old = sum(capacity_of(engine) for engine in engines if engine.endpoint.on_trial is None)
    return old + min(new, old * trial.percent // (100 - trial.percent)) if old else new


def capacity_of(engine: EngineView) -> int:
    """Return how many requests an engine should have at once."""
    if engine.facts is None:
        return UNKNOWN_CAPACITY
    running = engine.facts.max_num_seqs
    return running + max(MIN_BUFFER, math.ceil(running * BUFFER_SHARE))
