"""What the engines of each service do now, asked of its routers every half minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pagefleet_protocol.metric_names import (
    ROUTER_FLEET_GENERATED_TOKENS,
    ROUTER_FLEET_KV_USAGE_RATIO,
    ROUTER_FLEET_REQUESTS_RUNNING,
    ROUTER_FLEET_REQUESTS_WAITING,
)

from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.handlers.pod_http import PodHttp
from pagefleet_operator.plan.observed import LiveSample, PodSeen

PERIOD_S = 30.0
AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class _Counted:
    """A router's counter at one moment."""

    pod: str
    at: float
    tokens: float


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
        self._counted: dict[Key, _Counted] = {}

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
            self._counted.pop(gone, None)
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
            if metrics is not None and ROUTER_FLEET_REQUESTS_RUNNING in metrics:
                sample = self._samples[key] = self._sampled(key, pod, metrics)
                return before is None or replace(before, at=sample.at) != sample
        return before is not None

    def _sampled(self, key: Key, pod: PodSeen, metrics: Mapping[str, float]) -> LiveSample:
        now = _Counted(pod.name, self._clock(), metrics.get(ROUTER_FLEET_GENERATED_TOKENS, 0.0))
        before, self._counted[key] = self._counted.get(key), now
        rate = 0.0
        if before is not None and before.pod == now.pod and now.at > before.at and now.tokens >= before.tokens:
            rate = (now.tokens - before.tokens) / (now.at - before.at)
        return LiveSample(
            at=self._now(),
            requests_running=round(metrics[ROUTER_FLEET_REQUESTS_RUNNING]),
            requests_waiting=round(metrics.get(ROUTER_FLEET_REQUESTS_WAITING, 0.0)),
            kv_usage=round(metrics.get(ROUTER_FLEET_KV_USAGE_RATIO, 0.0), 3),
            tokens_per_second=round(rate, 1),
        )
