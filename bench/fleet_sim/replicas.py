"""Several replicas of a router before the same engines: each sees its part of the requests, and all events and metrics.

Clients reach one by chance, as behind a Service. What a policy keeps for itself (history of routes, counts of running
requests) is each replica's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.fleet_sim.engine import SimEngine
from bench.fleet_sim.jobs import Job
from bench.fleet_sim.run import SimRouter


class Replicas:
    """A router that is several; see SimRouter."""

    def __init__(self, routers: Sequence[SimRouter], seed: int) -> None:
        self.poll_s = routers[0].poll_s
        self._routers = routers
        self._rng = random.Random(seed)
        self._of: dict[int, SimRouter] = {}

    def route(self, job: Job, now: float) -> int:
        """See SimRouter."""
        self._of[job.number] = router = self._rng.choice(self._routers)
        return router.route(job, now)

    def first_token(self, job: Job, now: float) -> None:
        """See SimRouter."""
        self._of[job.number].first_token(job, now)

    def finished(self, job: Job, now: float) -> None:
        """See SimRouter."""
        self._of.pop(job.number).finished(job, now)

    def stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        for router in self._routers:
            router.stored(engine, keys, now)

    def removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        for router in self._routers:
            router.removed(engine, keys, now)

    def poll(self, engine: SimEngine, now: float) -> None:
        """See SimRouter."""
        for router in self._routers:
            router.poll(engine, now)
