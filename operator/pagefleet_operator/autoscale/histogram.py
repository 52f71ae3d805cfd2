"""What happened between two readings of a Prometheus histogram."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by their upper bounds, cumulative as Prometheus has them."""

    bounds: tuple[float, ...] = ()
    """Seconds, rising; the last one is infinite."""
    counts: tuple[float, ...] = ()
    """Observations of at most each bound."""
    seconds: float = 0.0
    """Sum of all observations."""

    @property
    def total(self) -> float:
        """Observations."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """Mean in seconds; None without observations."""
        return self.seconds / self.total if self.total > 0 else None

    def since(self, before: Histogram) -> Histogram:
        """Return what was observed after `before`; all of it where the process counts from the start again."""
        restarted = self.bounds != before.bounds or any(
            now < then for now, then in zip(self.counts, before.counts, strict=True)
        )
        if restarted:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, max(0.0, self.seconds - before.seconds))

    def plus(self, other: Histogram) -> Histogram:
        """Return both together. Of two versions with other bounds, the one that has seen more speaks for both."""
        if self.bounds == other.bounds:
            counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
            return Histogram(self.bounds, counts, self.seconds + other.seconds)
        return self if self.total >= other.total else other

    def share_within(self, seconds: float) -> float | None:
        """Return the share of observations of at most `seconds`, 0 to 1; None without observations."""
        if self.total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if seconds < bound:
                # Evenly spread within a bucket; of the last one, which has no end, nothing is within.
                part = (seconds - lower) / (bound - lower) if bound != float("inf") else 0.0
                return (below + (count - below) * max(0.0, part)) / self.total
            lower, below = bound, count
        return 1.0

    def quantile(self, share: float) -> float | None:
        """Return seconds that `share` of the observations do not exceed; None without observations."""
        if self.total <= 0:
            return None
        wanted, lower, below = share * self.total, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * ((wanted - below) / (count - below) if count > below else 1.0)
            lower, below = bound, count
        return lower
