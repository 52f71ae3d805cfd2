"""Tokens that a model's engines complete per second, over the last half minute."""

from __future__ import annotations

WINDOW_S = 30


class ServiceRate:
    """Counts tokens by the second in which their request ended."""

    def __init__(self) -> None:
        self._tokens = [0] * WINDOW_S
        self._second = -1
        self._since: float | None = None

    def add(self, num_tokens: int, now: float) -> None:
        """Count a request's tokens; `now` in monotonic seconds."""
        second = int(now)
        if second != self._second:
            self._roll(second, now)
        self._tokens[self._second % WINDOW_S] += num_tokens

    def per_second(self, now: float) -> float:
        """Return the mean since the first request, at most over the window; 0 while nothing is known."""
        if self._since is None:
            return 0.0
        self._roll(int(now), now)
        return sum(self._tokens) / min(WINDOW_S, max(1.0, now - self._since))

    def _roll(self, second: int, now: float) -> None:
        if self._since is None:
            self._since = now
        for passed in range(min(WINDOW_S, second - self._second)):
            self._tokens[(second - passed) % WINDOW_S] = 0
        self._second = max(self._second, second)
