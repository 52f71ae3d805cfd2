"""Asks the routers of a service how busy it is, and prefill and decode engines whether they reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pagefleet_protocol.engine_facts import FACTS_PATH

from pagefleet_operator.autoscale.fleet_numbers import FleetNumbers, parse_fleet_metrics
from pagefleet_operator.autoscale.signals import FleetWindow, pair_load
from pagefleet_operator.autoscale.trial_window import TrialWindow
from pagefleet_operator.local.probe import METRICS_PATH, fetch, listen
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.kv_link import KvEngineSeen, read_kv_engine
from pagefleet_operator.plan.observed import LiveSample
from pagefleet_operator.plan.pair_ratio import PairLoad

_Urls = Callable[[], Mapping[str, str]]


class FleetWatch:
    """Keeps what they said last; `run` until it is cancelled."""

    def __init__(self, timing: Timing, engines: _Urls, routers: _Urls, changed: Callable[[], None]) -> None:
        """Begin with nothing said.

        Args:
            timing: how often, and how patiently.
            engines: returns the base URLs of prefill and decode engines that are ready, by name.
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
        self.live: LiveSample | None = None
        """What engines do now; None: no router says."""
        self.trial = TrialWindow()
        """What routers count while a revision is tried out."""
        self._numbers = FleetNumbers()

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
        if seen != self.seen or self.trial.is_followed:
            self.seen = seen
            self._changed()

    async def _read_routers(self) -> None:
        routers = self._routers()
        now, pages = await listen(self._window, routers, self._timing.probe_timeout)
        self.load = pair_load(self._window.signals(routers.keys(), now))
        self.trial.keep_only(frozenset(routers))
        for name, page in pages.items():
            self.trial.hear(name, page)
        at = datetime.now(UTC)
        heard = ((name, parse_fleet_metrics(page)) for name, page in pages.items())
        samples = (self._numbers.sample(name, metrics, now, at) for name, metrics in heard)
        self.live = next((one for one in samples if one is not None), None)

    async def _ask(self, name: str, url: str) -> KvEngineSeen | None:
        timeout_s = self._timing.probe_timeout
        facts, metrics = await asyncio.gather(fetch(url + FACTS_PATH, timeout_s), fetch(url + METRICS_PATH, timeout_s))
        return read_kv_engine(name, facts, metrics)
