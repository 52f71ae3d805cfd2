"""Asks the engines of a disaggregated service whether they reach each other, and its routers how busy it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pagefleet_protocol.engine_facts import FACTS_PATH

from pagefleet_operator.autoscale.signals import FleetWindow, pair_load
from pagefleet_operator.local.probe import fetch
from pagefleet_operator.local.router_pages import METRICS_PATH, listen
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.kv_link import KvEngineSeen, read_kv_engine
from pagefleet_operator.plan.pair_ratio import PairLoad

_Urls = Callable[[], Mapping[str, str]]


class PairWatch:
    """Keeps what they said last; `run` until it is cancelled."""

    def __init__(self, timing: Timing, engines: _Urls, routers: _Urls, changed: Callable[[], None]) -> None:
        """Begin with nothing said.

        Args:
            timing: how often, and how patiently.
            engines: returns the base URLs of those that are ready, by name.
            routers: the same of routers.
            changed: called when an engine says something else than before.
        """
        self._timing = timing
        self._engines = engines
        self._routers = routers
        self._changed = changed
        self._window = FleetWindow()
        self.seen: tuple[KvEngineSeen, ...] = ()
        """What those engines said that answered."""
        self.load: PairLoad | None = None
        """What routers measured; None: one of them is silent."""

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self._timing.pair_period)

    async def step(self) -> None:
        """Ask once."""
        await self._read_routers()
        found = await asyncio.gather(*(self._ask(name, url) for name, url in self._engines().items()))
        seen = tuple(one for one in found if one is not None)
        if seen != self.seen:
            self.seen = seen
            self._changed()

    async def _read_routers(self) -> None:
        routers = self._routers()
        now = await listen(self._window, routers, self._timing.probe_timeout)
        self.load = pair_load(self._window.signals(routers.keys(), now))

    async def _ask(self, name: str, url: str) -> KvEngineSeen | None:
        timeout_s = self._timing.probe_timeout
        facts, metrics = await asyncio.gather(fetch(url + FACTS_PATH, timeout_s), fetch(url + METRICS_PATH, timeout_s))
        return read_kv_engine(name, facts, metrics)
