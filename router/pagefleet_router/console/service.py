"""Where the router reads how its InferenceService is, when somebody looks: from a file, or from the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagefleet_protocol.service_news import NO_NEWS, ServiceNews, ServiceNewsError, read_news, with_history

from pagefleet_router.errors import RouterError

logger = logging.getLogger(__name__)

_MAX_BYTES = 4 * 2**20


FILE_PERIOD_S, CLUSTER_PERIOD_S = 1.0, 5.0
"""Between two looks, while somebody looks at the console."""


class NewsError(RouterError):
    """The news cannot be had now; the message is for the log."""


class FollowedNews:
    """Keeps what was known last, with the decisions that were seen.

    Args:
        ask: returns the InferenceService as JSON; raises a RouterError where it cannot.
        period: seconds between two questions.
        clock: monotonic seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[bytes]], period: float, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._period = period
        self._clock = clock
        self._asked_at: float | None = None
        self._news = NO_NEWS
        self._complaint = ""

    async def news(self) -> ServiceNews:
        """Return what is known; what cannot be read stays as it was, and the log says so once."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= self._period:
            self._asked_at = now
            try:
                self._news = with_history(self._news, read_news(await self._ask()))
                self._complaint = ""
            except (RouterError, ServiceNewsError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    logger.warning("what the InferenceService says is not known to the console: %s", error)
        return self._news


async def no_news() -> ServiceNews:
    """Return that this router belongs to no InferenceService."""
    return NO_NEWS


def ask_file(path: Path) -> Callable[[], Awaitable[bytes]]:
    """Return what reads a file that somebody else replaces."""

    async def ask() -> bytes:
        try:
            return await asyncio.to_thread(_read, path)
        except OSError as error:
            raise NewsError(f"{path} cannot be read ({error.strerror})") from error

    return ask


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)
