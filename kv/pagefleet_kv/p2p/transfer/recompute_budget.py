"""How many prompt tokens a decode engine may compute for transfers that failed, so that its decoding stays even."""

from __future__ import annotations


class RecomputeBudget:
    """A bucket of one minute's tokens. A prompt larger than all of it may go when it is full, and is paid off after."""

    def __init__(self, tokens_per_minute: int) -> None:
        self._per_minute = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._at: float | None = None

    def take(self, num_tokens: int, now: float) -> bool:
        """Take tokens if there are enough; False: nothing is taken."""
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._level = min(float(self._per_minute), self._level + elapsed * self._per_minute / 60)
        if not self._per_minute or self._level < min(num_tokens, self._per_minute):
            return False
        self._level -= num_tokens
        return True
