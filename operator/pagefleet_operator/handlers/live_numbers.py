"""What the engines of each service do now, asked of its routers every half minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from pagefleet_operator.autoscale.fleet_numbers import FleetNumbers
from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.handlers.pod_http import PodHttp
from pagefleet_operator.plan.observed import LiveSample

PERIOD_S = 30.0
AT_A_TIME = 8


class LiveNumbers:
    """Keeps the last sample of each service."""

    def __init__(
        self,
        pods: PodHttp,
        view: ClusterView,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without samples; `now` is what people's clocks show."""
        self._pods = pods
        self._view = view
        self._now = now
        self._clock = clock
        self._samples: dict[Key, LiveSample] = {}
        self._numbers: dict[Key, FleetNumbers] = {}

    def sample(self, key: Key) -> LiveSample | None:
        """Return the last sample of a service; None: no router said anything of late."""
        return self._samples.get(key)

    async def run(self, wake: Callable[[Iterable[Key]], None]) -> None:
        """Ask for ever; `wake` gets the services whose numbers changed."""
        while True:
            started = self._clock()
            wake(await self.look())
            await asyncio.sleep(max(1.0, PERIOD_S - (self._clock() - started)))

    async def look(self) -> Sequence[Key]:
        """Ask the routers of every service once; returns the services whose numbers changed."""
        keys = tuple(self._view.services())
        for gone in set(self._samples) - set(keys):
            self._samples.pop(gone)
            self._numbers.pop(gone, None)
        changed: list[Key] = []
        limit = asyncio.Semaphore(AT_A_TIME)

        async def one(key: Key) -> None:
            async with limit:
                if await self._ask(key):
                    changed.append(key)

        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(one(key))
        return changed

    async def _ask(self, key: Key) -> bool:
        before = self._samples.pop(key, None)
        routers = [pod for pod in self._view.pods(key) if pod.component == "router" and pod.ready and pod.ip]
        for pod in routers[:2]:
            metrics = await self._pods.fleet_metrics(pod.ip)
            numbers = self._numbers.setdefault(key, FleetNumbers())
            sample = numbers.sample(pod.name, metrics or {}, self._clock(), self._now())
            if sample is not None:
                self._samples[key] = sample
                return before is None or replace(before, at=sample.at) != sample
        return before is not None
