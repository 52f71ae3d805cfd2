"""What engines say of their K/V transfer, asked of each no more often than every few seconds.

A service with hundreds of engines is reconciled several times a second while they come and go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagefleet_operator.handlers.cluster_view import Key
from pagefleet_operator.handlers.pod_http import PodHttp
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import PodSeen

FRESH_S = 10.0
"""An answer counts for so long; so does it that there was none."""
AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class _Answer:
    ip: str
    at: float
    seen: KvEngineSeen | None


class KvAnswers:
    """Keeps the last answers of all engines, as long as they are fresh."""

    def __init__(self, pods: PodHttp, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without answers."""
        self._pods = pods
        self._clock = clock
        self._answers: dict[tuple[Key, str], _Answer] = {}

    async def of(self, key: Key, pods: Sequence[PodSeen]) -> tuple[KvEngineSeen, ...]:
        """Return what the ready engines among the pods of one service say; those that do not answer are left out."""
        now = self._clock()
        for known in [one for one, answer in self._answers.items() if now - answer.at >= FRESH_S]:
            del self._answers[known]
        engines = [pod for pod in pods if pod.role and pod.ready and pod.ip and not pod.deleting]
        limit = asyncio.Semaphore(AT_A_TIME)

        async def ask(pod: PodSeen) -> KvEngineSeen | None:
            known = self._answers.get((key, pod.name))
            if known is not None and known.ip == pod.ip:
                return known.seen
            async with limit:
                seen = await self._pods.kv_engine(pod.name, pod.ip)
            self._answers[key, pod.name] = _Answer(pod.ip, now, seen)
            return seen

        return tuple(one for one in await asyncio.gather(*map(ask, engines)) if one is not None)
