"""Durations in buckets, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class SecondsHistogram:
    """Counts durations into BUCKETS."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> Sequence[tuple[str, int]]:
        """Return cumulative counts by upper bound."""
        bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))
