"""The simulation's clock: one heap of events, no sockets, no threads."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.fleet_sim.engine import EngineModel, SimEngine, Watch
from bench.fleet_sim.jobs import Job
from bench.fleet_sim.traces import Trace


class SimRouter(Protocol):
    """A router under test; it hears what a real one would."""

    poll_s: float
    """How often it looks at the engines' metrics."""

    def route(self, job: Job, now: float) -> int:
        """Return the number of the engine for a request."""

    def first_token(self, job: Job, now: float) -> None:
        """A stream began."""

    def finished(self, job: Job, now: float) -> None:
        """A request is over."""

    def stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        """An event came."""

    def removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        """An event came."""

    def poll(self, engine: SimEngine, now: float) -> None:
        """Metrics were read."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated beside the traffic."""

    models: Sequence[EngineModel]
    event_delay: float = 0.1
    """Seconds from a change in a cache to the router."""
    limit: float = 400.0
    """Seconds after which the simulation is stopped: whoever has no token by then never got one."""


class Simulation:
    """Plays a trace through a router."""

    def __init__(self, fleet: Fleet, router: SimRouter) -> None:
        watch = Watch(self._first_token, self._finished, self._stored, self._removed)
        self.engines = [SimEngine(number, model, watch) for number, model in enumerate(fleet.models)]
        self.jobs: list[Job] = []
        self.now = 0.0
        self._fleet = fleet
        self._router = router
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_open = 0

    def run(self, trace: Trace) -> list[Job]:
        """Return all requests, with what became of them."""
        for at, job in trace:
            self._at(at, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self._num_open = len(trace)
        self._at(0.0, self._poll)
        while self._events and self._num_open:
            self.now, _, happen = heapq.heappop(self._events)
            if self.now > self._fleet.limit:
                break
            happen()
        return self.jobs

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _arrive(self, job: Job) -> None:
        job.sent_at = self.now
        self.jobs.append(job)
        job.engine = self._router.route(job, self.now)
        engine = self.engines[job.engine]
        engine.submit(job)
        self._step(engine)

    def _step(self, engine: SimEngine) -> None:
        if engine.is_stepping or not engine.has_work():
            return
        engine.is_stepping = True
        seconds = engine.begin_step(self.now)
        self._at(self.now + seconds, lambda: self._end_step(engine))

    def _end_step(self, engine: SimEngine) -> None:
        engine.end_step(self.now)
        engine.is_stepping = False
        self._step(engine)

    def _poll(self) -> None:
        for engine in self.engines:
            self._router.poll(engine, self.now)
        self._at(self.now + self._router.poll_s, self._poll)

    def _first_token(self, job: Job, now: float) -> None:
        self._router.first_token(job, now)

    def _finished(self, job: Job, now: float) -> None:
        self._router.finished(job, now)
        following = job.then
        if following is None:
            self._num_open -= 1
        else:
            self._at(now + job.think, lambda: self._arrive(following))

    def _stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        when = now + self._fleet.event_delay
        self._at(when, lambda: self._router.stored(engine, keys, when))

    def _removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        when = now + self._fleet.event_delay
        self._at(when, lambda: self._router.removed(engine, keys, when))


class Replicas:
    """Several replicas of a router before the same engines: each sees its part of the requests, and all events.

    Clients reach one by chance, as behind a Service. What a policy keeps for itself is each replica's own.
    """

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests after the warm-up. Seconds; a request without a token counts as one that waits to the end."""

    num_requests: int
    hit_rate: float
    """Prompt tokens that came from a cache."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    output_rate: float
    """Tokens a second of finished requests."""
    imbalance: float
    """The busiest engine's requests over the mean."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def outcome_of(jobs: Sequence[Job], warm_up: float, end: float, num_engines: int) -> Outcome:
    """Measure what was sent from `warm_up` on, until `end`.

    Raises:
        ValueError: there is nothing.
    """
    measured = [job for job in jobs if job.sent_at >= warm_up]
    if not measured:
        raise ValueError("no request came after the warm-up: simulate for longer")
    waits = [(end if job.first_token_at is None else job.first_token_at) - job.sent_at for job in measured]
    begun = [job for job in measured if job.first_token_at is not None]
    counts = Counter(job.engine for job in measured)
    tokens = sum(job.num_output for job in jobs if job.ended_at is not None and warm_up <= job.ended_at <= end)
    return Outcome(
        len(measured),
        sum(job.num_hit for job in begun) / max(1, sum(job.num_tokens for job in begun)),
        percentile(waits, 0.5),
        percentile(waits, 0.9),
        percentile(waits, 0.99),
        tokens / max(end - warm_up, math.ulp(1.0)),
        max(counts.values()) * num_engines / len(measured),
    )
