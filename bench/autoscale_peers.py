"""Autoscalers of others, written from their descriptions, for the simulator.

Knative KPA (knative.dev, kpa-specific), a HorizontalPodAutoscaler on requests per pod, KubeAI's mean of active
requests, llm-d's token-aware signal (keda-epp-token-aware), and its SLO-aware one. Those that need the requests that
one engine can take, or its prefill rate, are given the measured ones: what a patient person would have found by hand,
for each trace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from pagefleet_operator.autoscale.router_page import Histogram, RouterReading

from bench.autoscale_fleet import CHUNK, ITL_S, PROMPT_RATE, STEP_S, TTFT_S, Fleet

CALIBRATED_RATE = CHUNK / (STEP_S + CHUNK / PROMPT_RATE)
"""Prompt tokens per second of one engine between the steps of few requests."""


class Peer(Protocol):
    """One way to decide; asked every two seconds."""

    def wanted(self, fleet: Fleet, now: float) -> int:
        """Return the engines from now on."""


def _requests(fleet: Fleet, now: float) -> float:
    reading = fleet.reading(now)
    return reading.held + sum(one.requests for one in fleet.ready(now))


class _Window:
    """Values of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> None:
        self._values.append((now, value))
        while self._values[0][0] <= now - self._seconds:
            self._values.popleft()

    def mean(self) -> float:
        return sum(value for _, value in self._values) / len(self._values)

    def most(self) -> float:
        return max(value for _, value in self._values)


class KnativeKpa:
    """Concurrency over 60 s at 70 % of the target; panic on 6 s from twice the ready capacity, for 60 s."""

    def __init__(self, edge: float, engines: int) -> None:
        self._target = edge * 0.7
        self._stable, self._panic = _Window(60), _Window(6)
        self._panicked, self._most, self._now = float("-inf"), engines, engines

    def wanted(self, fleet: Fleet, now: float) -> int:
        for window in (self._stable, self._panic):
            window.add(_requests(fleet, now), now)
        ready = max(1, len(fleet.ready(now)))
        stable = max(math.ceil(self._stable.mean() / self._target), ready // 2)
        panic = math.ceil(self._panic.mean() / self._target)
        if panic >= 2 * ready:
            self._panicked = now
        if now - self._panicked < 60:
            self._most = max(self._most, panic, self._now)
            self._now = self._most
        else:
            self._most = self._now = stable
        return self._now


class Hpa:
    """Requests per pod against the target every 15 s, a tenth of tolerance, down by the most of 300 s."""

    def __init__(self, edge: float, engines: int) -> None:
        self._target, self._engines, self._next = edge, engines, 0.0
        self._down = _Window(300)

    def wanted(self, fleet: Fleet, now: float) -> int:
        if now < self._next:
            return self._engines
        self._next = now + 15
        # Pods that are not ready count as idle ones when more are wanted.
        ratio = _requests(fleet, now) / max(1, len(fleet.serving())) / self._target
        wanted = self._engines if abs(ratio - 1) <= 0.1 else math.ceil(len(fleet.serving()) * ratio)
        wanted = min(wanted, max(2 * self._engines, self._engines + 4))
        self._down.add(wanted, now)
        self._engines = max(wanted, min(self._engines, int(self._down.most())))
        return self._engines


class KubeAi:
    """Mean of active requests over ten minutes, every 10 s, and a delay of 30 s before fewer."""

    def __init__(self, edge: float, engines: int) -> None:
        self._target, self._engines, self._next = edge, engines, 0.0
        self._mean, self._down = _Window(600), _Window(30)

    def wanted(self, fleet: Fleet, now: float) -> int:
        self._mean.add(_requests(fleet, now), now)
        if now >= self._next:
            self._next = now + 10
            wanted = math.ceil(self._mean.mean() / self._target)
            self._down.add(wanted, now)
            self._engines = max(wanted, min(self._engines, int(self._down.most())))
        return self._engines


class TokenAware:
    """Prompt tokens in flight over the calibrated rate and the threshold; KV cache over 0.8; KEDA's overshoot guard."""

    def __init__(self, edge: float, engines: int) -> None:
        self._engines, self._next = engines, 0.0
        self._down = _Window(300)

    def wanted(self, fleet: Fleet, now: float) -> int:
        if now < self._next:
            return self._engines
        self._next = now + 15
        reading = fleet.reading(now)
        threshold = 0.65 * (TTFT_S - 0.25)
        prefill = (reading.prefill_tokens + reading.queued_tokens) / CALIBRATED_RATE / threshold
        demand = math.ceil(max(prefill, reading.kv_usage * reading.engines / 0.8))
        replicas, pending = len(fleet.serving()), len(fleet.serving()) - len(fleet.ready(now))
        wanted = demand if demand <= replicas else max(demand - pending, replicas)
        self._down.add(wanted, now)
        self._engines = max(wanted, min(self._engines, int(self._down.most())))
        return self._engines


class SloAware:
    """p90 of both latencies over their targets, smoothed over 45 s: more from 0.55 on, fewer below 0.40."""

    def __init__(self, edge: float, engines: int) -> None:
        self._engines, self._next = engines, 0.0
        self._score, self._down = _Window(45), _Window(300)
        self._readings: deque[tuple[float, RouterReading]] = deque()

    def wanted(self, fleet: Fleet, now: float) -> int:
        reading = fleet.reading(now)
        self._readings.append((now, reading))
        while self._readings[0][0] < now - 45:
            self._readings.popleft()
        before = self._readings[0][1]
        self._score.add(
            min(2.0, max(_p90(reading.first_token, before.first_token) / TTFT_S,
                         _p90(reading.between_tokens, before.between_tokens) / ITL_S)), now,
        )  # fmt: skip
        if now >= self._next:
            self._next = now + 15
            score, ready = self._score.mean(), len(fleet.ready(now))
            wanted = math.ceil(ready * score / 0.55) if score > 0.55 or score < 0.40 else self._engines
            wanted = max(wanted, self._engines) if score > 0.55 and ready < self._engines else wanted
            self._down.add(wanted, now)
            self._engines = min(8, max(wanted, min(self._engines, int(self._down.most()))))
        return self._engines


def _p90(now: Histogram, before: Histogram) -> float:
    return now.since(before).quantile(0.9) or 0.0


PEERS: Mapping[str, Callable[[float, int], Peer]] = {
    "knative kpa": KnativeKpa,
    "hpa, requests": Hpa,
    "kubeai": KubeAi,
    "llm-d token-aware": TokenAware,
    "llm-d slo-aware": SloAware,
}
