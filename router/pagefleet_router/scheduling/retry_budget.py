"""How many retries are allowed: a share of live requests, and of the traffic, so that they never become a storm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryRules:
    """The limits."""

    ratio: float = 0.2
    """Retries per live request, and per request over time."""
    min_live: int = 3
    """Retries at once that are always allowed."""
    reserve: float = 20.0
    """Retries that a quiet time saves up, beyond the ratio."""


class RetryBudget:
    """Two bounds at once: retries in flight against requests in flight, and a bucket that every request fills a little.

    The first alone would let fast failures through: retries that fail at once are never many at a time.
    """

    def __init__(self, rules: RetryRules | None = None) -> None:
        self._rules = rules or RetryRules()
        self._tokens = self._rules.reserve
        self._live_requests = 0
        self._live_retries = 0

    @property
    def live_requests(self) -> int:
        """Requests in flight."""
        return self._live_requests

    def request_began(self) -> None:
        """Count a request."""
        self._live_requests += 1
        self._tokens = min(self._rules.reserve, self._tokens + self._rules.ratio)

    def request_ended(self, num_retries: int) -> None:
        """Count its end, with the retries it was granted."""
        self._live_requests -= 1
        self._live_retries -= num_retries

    def try_retry(self) -> bool:
        """Grant one retry if the budget has it; it counts as live until its request ends."""
        allowed = max(self._rules.min_live, int(self._rules.ratio * self._live_requests))
        if self._live_retries >= allowed or self._tokens < 1:
            return False
        self._tokens -= 1
        self._live_retries += 1
        return True
