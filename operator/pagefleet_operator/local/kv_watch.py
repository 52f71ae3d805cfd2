"""Asks the engines of a disaggregated service, every few seconds, whether they take K/V from each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pagefleet_protocol.engine_facts import FACTS_PATH

from pagefleet_operator.local.probe import fetch
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.kv_engine_page import read_kv_engine
from pagefleet_operator.plan.kv_link import KvEngineSeen


class KvWatch:
    """Keeps what they said last; `run` until it is cancelled."""

    def __init__(self, timing: Timing, look: Callable[[], Mapping[str, str]], changed: Callable[[], None]) -> None:
        """`look` returns the base URLs of engines that are ready, by name; `changed` is called when one says more."""
        self._timing = timing
        self._look = look
        self._changed = changed
        self.seen: tuple[KvEngineSeen, ...] = ()
        """What those said that answered."""

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self._timing.kv_link_period)

    async def step(self) -> None:
        """Ask once."""
        found = await asyncio.gather(*(self._ask(name, url) for name, url in self._look().items()))
        seen = tuple(one for one in found if one is not None)
        if seen != self.seen:
            self.seen = seen
            self._changed()

    async def _ask(self, name: str, url: str) -> KvEngineSeen | None:
        timeout_s = self._timing.probe_timeout
        facts, metrics = await asyncio.gather(fetch(url + FACTS_PATH, timeout_s), fetch(url + "/metrics", timeout_s))
        return read_kv_engine(name, facts, metrics)
