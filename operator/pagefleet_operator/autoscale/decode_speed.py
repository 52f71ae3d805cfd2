"""Learns how the time between tokens grows with the requests that an engine runs at once.

A straight line through what was seen, older sightings weighing less. One engine's step takes a fixed time (reading the
weights) and one that grows with each request (its KV cache), so a line is close; where the requests at an engine hardly
varied there is none yet, and nothing is concluded from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 600.0
MIN_SIGHTINGS = 15.0
"""Sum of weights."""
MIN_SPREAD = 0.15
"""Standard deviation of the requests per engine over their mean."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Weighted sums of a linear regression: x requests per engine, y seconds between tokens."""

    at: float = 0.0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def seen(self, requests: float, seconds: float, now: float) -> DecodeSpeed:
        """Return it with one more sighting."""
        fade = math.pow(0.5, max(0.0, now - self.at) / HALF_LIFE_S)
        return DecodeSpeed(
            now,
            self.weight * fade + 1,
            self.x * fade + requests,
            self.y * fade + seconds,
            self.xx * fade + requests * requests,
            self.xy * fade + requests * seconds,
        )

    def requests_within(self, seconds: float) -> float | None:
        """Return how many requests one engine may run with `seconds` between tokens; None: that is not known."""
        if self.weight < MIN_SIGHTINGS:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        if variance <= (MIN_SPREAD * mean_x) ** 2:
            return None
        slope = (self.xy / self.weight - mean_x * mean_y) / variance
        fixed = mean_y - slope * mean_x
        if slope <= 0 or fixed < 0 or fixed >= seconds:
            return None
        return (seconds - fixed) / slope
