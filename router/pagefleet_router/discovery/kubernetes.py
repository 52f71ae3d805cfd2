"""Follows a Service's EndpointSlices: list, watch, and begin again whatever happens.

The engines found last stay in force while the API server is away: serving does not need it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from pagefleet_protocol.endpoints import Endpoint

from pagefleet_router.discovery.endpoint_slices import engines_of
from pagefleet_router.discovery.slice_api import ApiAccess, ApiServerError, SliceApi
from pagefleet_router.discovery.slice_cache import SliceCache
from pagefleet_router.discovery.source import EndpointSink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchTiming:
    """Seconds."""

    watch: float = 300.0
    """How long one watch may last; the server ends it then."""
    silence: float = 90.0
    """A watch without a byte for so long is dead: the server sends a bookmark each minute."""
    least: float = 1.0
    """From the beginning of one attempt to the next, whatever becomes of it."""
    longest: float = 30.0
    """Between attempts that fail in a row."""


def pause_s(num_failures: int, retry_after_s: float, lasted_s: float, chance: float, timing: WatchTiming) -> float:
    """Return how long to wait before the next attempt: exponentially longer, at random within a factor of two.

    Args:
        num_failures: in a row; 0 after a watch that ended as it should.
        retry_after_s: what the server asked for.
        lasted_s: how long the last attempt took.
        chance: 0 to 1.
        timing: the bounds.
    """
    longest = min(timing.longest, timing.least * 2 ** min(num_failures, 30)) if num_failures else 0.0
    return max(longest * (1 + chance) / 2, retry_after_s, timing.least - lasted_s)


@dataclass(frozen=True, slots=True)
class ServiceRef:
    """Whose pods are the engines, and what they serve."""

    namespace: str
    service: str
    model: str


class KubernetesSource:
    """A source of endpoints.

    Args:
        access: the API server.
        target: the Service.
        timing: how it is watched.
        clock: monotonic seconds.
    """

    def __init__(
        self, access: ApiAccess, target: ServiceRef, timing: WatchTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._access = access
        self._target = target
        self._timing = timing or WatchTiming()
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._cache = SliceCache()
        self._reported: tuple[Endpoint, ...] | None = None
        self._num_failures = 0
        self._complaint = ""

    async def run(self, sink: EndpointSink) -> None:
        """Report until cancelled."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
            api = SliceApi(session, self._access, self._target.namespace, self._target.service)
            while True:
                began, retry_after = self._clock(), 0.0
                try:
                    await self._follow(api, sink)
                    self._num_failures = 0
                except ApiServerError as error:
                    self._failed(error, sink)
                    retry_after = error.retry_after_s
                lasted, chance = self._clock() - began, self._random.random()
                await asyncio.sleep(pause_s(self._num_failures, retry_after, lasted, chance, self._timing))

    async def _follow(self, api: SliceApi, sink: EndpointSink) -> None:
        """List if that is needed, then report events until the watch ends."""
        cache, timing = self._cache, self._timing
        if cache.version is None:
            cache.replace(await api.list())
            self._report(sink)
        assert cache.version is not None
        length = timing.watch * self._random.uniform(0.8, 1.0)
        async with api.watch(cache.version, length, timing.silence) as lines:
            self._answers_again()
            async for line in lines:
                cache.apply(line)
                self._num_failures = 0
                self._report(sink)

    def _report(self, sink: EndpointSink) -> None:
        found = engines_of(self._cache.slices.values(), self._target.model)
        if found != self._reported:
            self._reported = found
            sink.replace(found)

    def _failed(self, error: ApiServerError, sink: EndpointSink) -> None:
        self._num_failures += 1
        if error.relist:
            self._cache.version = None
        reason = str(error)
        sink.explain(reason)
        if reason != self._complaint:
            self._complaint = reason
            known = "no engine is known yet" if self._reported is None else "the last list of engines stays in force"
            logger.warning("%s; %s", reason, known)

    def _answers_again(self) -> None:
        if self._complaint:
            self._complaint = ""
            logger.info("the Kubernetes API server answers again")
