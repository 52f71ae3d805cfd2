"""When to try again, and when to give up."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pagefleet_operator.download.errors import Interrupted, StoreUnreachable
from pagefleet_operator.download.settings import DownloadSettings

T = TypeVar("T")


class Attempts:
    """Counts failures in a row of one piece of work, and pauses after each."""

    def __init__(self, settings: DownloadSettings) -> None:
        self._patience = settings.patience
        self._sleep = settings.host.sleep
        self._num_failures = 0

    def progress(self) -> None:
        """The work advanced: failures count from the beginning again."""
        self._num_failures = 0

    async def failed(self, failure: Interrupted) -> None:
        """Pause before the next attempt.

        Raises:
            StoreUnreachable: that was the last.
        """
        patience = self._patience
        self._num_failures += 1
        if self._num_failures >= patience.attempts:
            raise StoreUnreachable(f"{failure} ({self._num_failures} attempts)") from failure
        longest = min(patience.backoff_first * 2 ** (self._num_failures - 1), patience.backoff_most)
        # Pods that started together must not come back together.
        pause = longest * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret
        if failure.retry_after is not None:
            pause = max(pause, min(failure.retry_after, patience.retry_after_most))
        await self._sleep(pause)


async def persist(work: Callable[[], Awaitable[T]], settings: DownloadSettings) -> T:
    """Do the work until it is not interrupted.

    Raises:
        StoreUnreachable: it was, too often.
    """
    attempts = Attempts(settings)
    while True:
        try:
            return await work()
        except Interrupted as failure:
            await attempts.failed(failure)
