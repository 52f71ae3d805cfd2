"""Learns what the time between tokens depends on, and so how many engines keep it within a target.

One step of an engine takes a fixed time (reading the weights), more with each request in it (its KV cache), and more
while prompts are computed between the steps. So, per engine: seconds = fixed + x * requests + u * prefill, where
prefill is the share of its time that prompts need. A linear regression over what was seen, older sightings weighing
less; where neither has varied yet nothing is concluded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 900.0
MIN_SIGHTINGS = 20.0
"""Sum of weights."""
MIN_SPREAD = 0.15
"""Standard deviation of the requests per engine over their mean."""
RIDGE = 0.02
"""Requests and prefill mostly rise together: this much of their variance keeps the solution small."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One engine's mean state at one moment."""

    requests: float
    prefill: float
    """Share of its time that prompts need, 0 to 1."""
    seconds: float
    """Between two tokens of a request."""


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """What was learned, in seconds."""

    fixed: float
    per_request: float
    per_prefill: float

    def engines(self, requests: float, prefill: float, seconds: float) -> float | None:
        """Return the engines that keep `seconds` between tokens; None: none do.

        Args:
            requests: that run, on all engines together.
            prefill: engines that do nothing but compute prompts, for the same prompts.
            seconds: the target.
        """
        if seconds <= self.fixed:
            return None
        return (self.per_request * requests + self.per_prefill * prefill) / (seconds - self.fixed)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Weighted means and second moments of the sightings: x requests, u prefill, y seconds."""

    at: float = 0.0
    weight: float = 0.0
    means: tuple[float, float, float] = (0.0, 0.0, 0.0)
    moments: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Around the means, summed: xx, xu, uu, xy, uy."""

    def seen(self, sighting: Sighting, now: float) -> DecodeSpeed:
        """Return it with one more sighting."""
        fade = math.pow(0.5, max(0.0, now - self.at) / HALF_LIFE_S)
        weight = self.weight * fade + 1
        x, u, y = sighting.requests, sighting.prefill, sighting.seconds
        before = self.means
        means = tuple(mean + (value - mean) / weight for mean, value in zip(before, (x, u, y), strict=True))
        dx, du, dy = x - before[0], u - before[1], y - before[2]
        ex, eu = x - means[0], u - means[1]
        grown = (dx * ex, dx * eu, du * eu, dy * ex, dy * eu)
        moments = tuple(fade * moment + more for moment, more in zip(self.moments, grown, strict=True))
        return DecodeSpeed(now, weight, (means[0], means[1], means[2]), moments)  # type: ignore[arg-type]

    def line(self) -> DecodeLine | None:
        """Return what was learned; None: not enough."""
        if self.weight < MIN_SIGHTINGS:
            return None
        xx, xu, uu, xy, uy = (moment / self.weight for moment in self.moments)
        mean_x, mean_u, mean_y = self.means
        if xx <= (MIN_SPREAD * mean_x) ** 2:
            return None
        uu += 1e-4  # where prefill never varied, nothing is its fault
        xx, uu = xx * (1 + RIDGE), uu * (1 + RIDGE)
        determinant = xx * uu - xu * xu
        per_request = (xy * uu - uy * xu) / determinant
        per_prefill = (uy * xx - xy * xu) / determinant
        if per_prefill < 0:
            per_request, per_prefill = xy / xx, 0.0
        fixed = mean_y - per_request * mean_x - per_prefill * mean_u
        if per_request <= 0 or fixed < 0:
            return None
        return DecodeLine(fixed, per_request, per_prefill)
