"""A limit per minute: a bucket that holds one minute's worth and fills steadily."""

from __future__ import annotations


class TokenBucket:
    """May run into debt, by `spend`; then nothing fits until that is paid.

    Args:
        per_minute: what flows in, and what the bucket holds.
        now: monotonic seconds; the bucket is full.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """Take another limit; what was spent stays spent."""
        self._settle(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until an amount fits, 0 if now. What is larger than the bucket fits a full one."""
        self._settle(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60.0 / self.per_minute)

    def spend(self, amount: float, now: float) -> None:
        """Take out, or below zero put back."""
        self._settle(now)
        self._level = min(self.per_minute, self._level - amount)

    def remaining(self, now: float) -> float:
        """Return what is there, at least 0."""
        self._settle(now)
        return max(0.0, self._level)

    def is_full(self, now: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        self._settle(now)
        return self._level >= self.per_minute

    def _settle(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now
