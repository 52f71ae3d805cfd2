"""Spreads requests out: a bucket that holds so many tokens and is refilled at a steady rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class TokenBucket:
    """Lets `burst` requests through at once, and `rate_per_s` in the long run, in the order they came."""

    def __init__(
        self,
        rate_per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Start full."""
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._sleep = sleep
        self._tokens = float(burst)
        self._filled_at = clock()

    async def take(self) -> None:
        """Take one token; wait until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate_per_s)
        self._filled_at = now
        # Going below zero books a place in the queue: whoever comes next waits longer.
        self._tokens -= 1.0
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate_per_s)
