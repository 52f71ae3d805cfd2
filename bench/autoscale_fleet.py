"""A fleet for the autoscaling simulator: engines that batch continuously, and the router before them.

An engine computes prompts in chunks between the steps of its running requests, so each slows the other. Engines take
time to start and drain before they go; both are paid for. Times are simulated seconds.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from pagefleet_operator.autoscale.router_page import Histogram, RouterReading

from bench.autoscale_traces import Request

TICK_S = 0.1
PROMPT_RATE = 16_000.0
"""Tokens per second of prompts alone."""
CHUNK = 512
STEP_S, STEP_PER_REQUEST_S, STEP_PER_TOKEN_S = 0.015, 0.00025, 4e-8
KV_TOKENS = 400_000
TTFT_S, ITL_S = 2.0, 0.06
"""The targets."""
_BOUNDS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, float("inf"))


@dataclass(slots=True)
class _Job:
    request: Request
    left: float
    """Prompt tokens to compute."""
    began: float = -1.0
    first: float = -1.0
    ends: float = 0.0


class Engine:
    """One engine."""

    def __init__(self, ready_at: float, made_at: float) -> None:
        self.made_at = made_at
        self.ready_at = ready_at
        self.draining = False
        self.backlog = 0.0
        self.kv = 0.0
        self.running: list[tuple[float, int, _Job]] = []
        self._prompts: deque[_Job] = deque()
        self._decoded = 0.0
        self._count = 0

    @property
    def requests(self) -> int:
        return len(self.running) + len(self._prompts)

    @property
    def waiting(self) -> int:
        return max(0, len(self._prompts) - 1)

    def take(self, request: Request) -> None:
        self._prompts.append(_Job(request, float(request.prompt)))
        self.backlog += request.prompt

    def advance(self, now: float, seen: Seen) -> None:
        """Compute for one tick."""
        step = STEP_S + STEP_PER_REQUEST_S * len(self.running) + STEP_PER_TOKEN_S * self.kv
        fits = self._prompts and self.kv + self._prompts[0].request.prompt <= KV_TOKENS
        if fits:
            step += CHUNK / PROMPT_RATE
            self._compute(CHUNK * TICK_S / step, now, seen)
        self._decoded += TICK_S / step
        self.kv += len(self.running) * TICK_S / step
        seen.generated += len(self.running) * TICK_S / step
        while self.running and self.running[0][0] <= self._decoded:
            _, _, job = heappop(self.running)
            self.kv = max(0.0, self.kv - job.request.prompt - job.request.output)
            seen.ended(job, now)

    def _compute(self, tokens: float, now: float, seen: Seen) -> None:
        while tokens > 0 and self._prompts:
            job = self._prompts[0]
            if job.began < 0:
                if self.kv + job.request.prompt > KV_TOKENS:
                    return
                job.began = now
                self.kv += job.request.prompt
            part = min(tokens, job.left)
            job.left -= part
            tokens -= part
            self.backlog = max(0.0, self.backlog - part)
            if job.left <= 0:
                self._prompts.popleft()
                job.first = now + TICK_S
                seen.started(job)
                self._count += 1
                heappush(self.running, (self._decoded + job.request.output, self._count, job))


@dataclass(slots=True)
class Seen:
    """What the router counts, and whether requests were within the targets."""

    draw: random.Random
    arrivals: int = 0
    prompt_tokens: float = 0.0
    generated: float = 0.0
    rate: float | None = None
    started_count: int = 0
    first: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))
    first_s: float = 0.0
    between: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))
    between_s: float = 0.0
    good: int = 0
    done: int = 0
    late_first: int = 0

    def started(self, job: _Job) -> None:
        wait_s = job.first - job.request.at
        self.first[bisect_left(_BOUNDS, wait_s)] += 1
        self.first_s += wait_s
        self.started_count += 1
        # The rate as a router learns it: what it sent over how long that took, with an error of its own.
        measured = job.request.prompt / max(TICK_S, job.first - job.began) * self.draw.uniform(0.9, 1.1)
        if job.request.prompt >= 2 * CHUNK or self.rate is None:
            self.rate = measured if self.rate is None else self.rate + 0.02 * (measured - self.rate)

    def ended(self, job: _Job, now: float) -> None:
        gap_s = (now + TICK_S - job.first) / job.request.output
        self.between[bisect_left(_BOUNDS, gap_s)] += 1
        self.between_s += gap_s
        self.done += 1
        in_time = job.first - job.request.at <= TTFT_S
        self.late_first += not in_time
        self.good += in_time and gap_s <= ITL_S


class Fleet:
    """Engines, and a router that gives each request to the one that will answer first."""

    def __init__(self, engines: int, start_up: tuple[float, float], draw: random.Random) -> None:
        self.engines = [Engine(0.0, 0.0) for _ in range(engines)]
        self.seen = Seen(draw)
        self.paid_s = 0.0
        self._start_up = start_up
        self._draw = draw
        self._held: deque[Request] = deque()
        self.started: list[float] = []
        """What engines took to start."""

    def ready(self, now: float) -> list[Engine]:
        return [one for one in self.engines if one.ready_at <= now and not one.draining]

    def serving(self) -> list[Engine]:
        """Return those that are wanted, ready or not."""
        return [one for one in self.engines if not one.draining]

    def scale(self, wanted: int, now: float) -> None:
        kept = self.serving()
        for _ in range(wanted - len(kept)):
            delay = self._draw.uniform(*self._start_up)
            self.started.append(delay)
            self.engines.append(Engine(now + delay, now))
        # Those that do not serve yet go first, as a Deployment has it.
        for engine in sorted(kept, key=lambda one: (one.ready_at <= now, -one.made_at))[: max(0, len(kept) - wanted)]:
            engine.draining = True

    def arrive(self, request: Request) -> None:
        self.seen.arrivals += 1
        self._held.append(request)

    def advance(self, now: float) -> None:
        ready = self.ready(now)
        while self._held and ready:
            request = self._held.popleft()
            self.seen.prompt_tokens += request.prompt
            min(ready, key=lambda one: one.backlog / PROMPT_RATE + 0.002 * one.requests).take(request)
        for engine in self.engines:
            if engine.ready_at <= now:
                engine.advance(now, self.seen)
        self.engines = [one for one in self.engines if not one.draining or (one.requests and one.ready_at <= now)]
        self.paid_s += len(self.engines) * TICK_S

    def reading(self, now: float) -> RouterReading:
        """Return what a router's metrics page says."""
        ready, seen = self.ready(now), self.seen
        return RouterReading(
            arrivals=seen.arrivals,
            prompt_tokens=seen.prompt_tokens,
            generated=seen.generated,
            held=len(self._held),
            queued_tokens=sum(one.prompt for one in self._held),
            prefill_tokens=sum(one.backlog for one in ready),
            engines=len(ready),
            running=sum(len(one.running) for one in ready),
            waiting=sum(one.waiting for one in ready),
            kv_usage=sum(one.kv for one in ready) / KV_TOKENS / len(ready) if ready else 0.0,
            prefill_rate=seen.rate if seen.started_count >= 10 else None,
            first_token=Histogram(_BOUNDS, tuple(map(float, accumulate(seen.first))), seen.first_s),
            between_tokens=Histogram(_BOUNDS, tuple(map(float, accumulate(seen.between))), seen.between_s),
        )
