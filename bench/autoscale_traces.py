"""Arrivals for the autoscaling simulator: four shapes of load, each from a seed. Loads are in requests per second."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Request:
    """What one client asks for."""

    at: float
    prompt: int
    """Uncached tokens."""
    output: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One shape of load."""

    name: str
    seconds: float
    peak: float
    """Requests per second at its highest: eight engines keep the targets there, and seven do not."""
    prompt: float
    output: float
    """Mean tokens; lengths are log-normal around them."""
    shape: Callable[[float, random.Random], float]
    """Share of the peak at a share of the time."""

    def requests(self, seed: int) -> Iterator[Request]:
        """Yield the arrivals in order: a Poisson process whose rate follows the shape."""
        draw = random.Random(f"{self.name} {seed}")
        levels = self._levels(draw)
        at = 0.0
        while True:
            at += draw.expovariate(self.peak)
            if at >= self.seconds:
                return
            if draw.random() < _between(levels, at / self.seconds * 720):
                yield Request(at, _length(draw, self.prompt, 0.6), _length(draw, self.output, 0.5))

    def load(self, seed: int) -> Callable[[float], float]:
        """Return the share of the peak at a second, without the chance of arrivals, mean over two minutes around it."""
        levels = self._levels(random.Random(f"{self.name} {seed}"))
        step_s = self.seconds / 720

        def around(at: float) -> float:
            near = levels[max(0, math.ceil((at - 60) / step_s)) : math.floor((at + 60) / step_s) + 1] or levels[-1:]
            return sum(near) / len(near)

        return around

    def _levels(self, draw: random.Random) -> list[float]:
        return [self.shape(step / 720, draw) for step in range(721)]


def traces() -> tuple[Trace, ...]:
    """Return the four of the issue."""
    hour = 3600.0
    return (
        Trace("prefill-heavy ramp", hour, 10.4, 6000, 120, _ramp),
        Trace("decode-heavy ramp", hour, 17.0, 400, 1000, _ramp),
        Trace("bursts", hour, 20.5, 2400, 300, _Bursts()),
        Trace("day curve", 2 * hour, 20.0, 2400, 300, _day),
    )


def _ramp(share: float, draw: random.Random) -> float:
    """A quarter of an hour up, ten minutes at the top, a quarter of an hour down, and low at both ends."""
    low = 0.2
    points = ((0.0, low), (0.08, low), (0.35, 1.0), (0.55, 1.0), (0.8, low), (1.0, low))
    for (left, before), (right, after) in pairwise(points):
        if share <= right:
            return before + (after - before) * (share - left) / (right - left)
    return low


class _Bursts:
    """Bursts of a quarter to three quarters of a minute upon a base that is calm or busy, each for some minutes."""

    def __call__(self, share: float, draw: random.Random) -> float:
        if share == 0:
            self._base, self._wanted, self._turn = 0.34, 0.34, draw.uniform(0.1, 0.2)
            self._burst_until, self._next_burst = 0.0, draw.uniform(0.0, 0.03)
        if share >= self._turn:
            self._wanted = 0.74 if self._wanted < 0.5 else 0.34
            self._turn = share + (draw.uniform(0.2, 0.32) if self._wanted < 0.5 else draw.uniform(0.13, 0.2))
        # Five minutes from one base to the other, in 720 steps an hour.
        self._base += max(-0.4 / 60, min(0.4 / 60, self._wanted - self._base))
        if share >= self._next_burst:
            self._burst_until = share + draw.uniform(15, 45) / 3600
            self._next_burst = self._burst_until + draw.expovariate(3600 / 75)
        return self._base * (1.35 if share < self._burst_until else 1.0)


def _day(share: float, draw: random.Random) -> float:
    """Night, morning, noon, a smaller evening, with a slow unrest upon it."""
    hour = 24 * share
    morning = math.exp(-(((hour - 11.5) / 3.2) ** 2))
    evening = 0.75 * math.exp(-(((hour - 19.0) / 2.4) ** 2))
    return min(1.0, 0.18 + 0.82 * max(morning, evening) + 0.03 * math.sin(hour * 5))


def _between(levels: list[float], place: float) -> float:
    left = min(int(place), len(levels) - 2)
    return levels[left] + (levels[left + 1] - levels[left]) * (place - left)


def _length(draw: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
